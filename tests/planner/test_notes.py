"""How a plan was made, in words for those who do not know the planner's own."""

import pytest

from megatron_epp.planner.chunks.params import UNCUT, ChunkingParams
from megatron_epp.planner.order.policies import PolicyParams


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (ChunkingParams(20.0, back=1), "chunks of about 1/20 of the work, small packs last"),
        (
            ChunkingParams(6.467, UNCUT, extra_bins=1),
            "chunks of about 1/6.47 of the work, documents left whole, "
            "1 pack more than even filling needs",
        ),
        (
            ChunkingParams(8.0, 0.5, -2, 1, 1, reverse=True, bare=True),
            "chunks of about 1/8 of the work, slices of 50% of a chunk, 2 packs fewer than even "
            "filling needs, small packs first and last, short documents first, "
            "recompute for one document at a time",
        ),
        (
            ChunkingParams(8.0, front=2, back=1, ramp=12),
            "chunks of about 1/8 of the work, 12 packs first that grow, small packs last",
        ),
        (PolicyParams(strict=True), "1F1B order"),
        (PolicyParams(False, lead=-2), "order free within memory, forwards 2 behind 1F1B"),
        (
            PolicyParams(True, True, 0.0, 0.6),
            "1F1B order, backward split, weight gradients at once",
        ),
        (
            PolicyParams(False, True, 4.0, 0.6, lead=1),
            "order free within memory, forwards 1 ahead of 1F1B, backward split, weight gradients "
            "in gaps, at most 4 of them waiting, overrunning a gap by up to 60%",
        ),
        (
            PolicyParams(False, True, float("inf")),
            "order free within memory, backward split, weight gradients in gaps",
        ),
    ],
)
def test_in_words(made: ChunkingParams | PolicyParams, text: str) -> None:
    assert str(made) == text
