"""The planner that searches its packing length, and stock in ``compare``."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.overlap import EXPERTS, TENSOR, overlapped, overlaps
from megatron_epp.ir import Kind
from megatron_epp.planner.options import Options
from megatron_epp.planner.published.schedules import packing_lengths
from megatron_epp.planner.registry import PLANNERS

K = 1024
BEST = "packing-best"
COST = named_cost("gpt-7b", "a100-80g", pp=4, cp=8, zero=1)


def test_a_batch_shorter_than_two_contexts_is_not_one_micro_batch() -> None:
    """24K tokens: two micro-batches of the context idle on four stages."""
    lengths, options = [2 * K] * 12, Options(context=16 * K)
    packing, best = (PLANNERS[name](lengths, COST, options) for name in ("packing", BEST))
    assert packing.packing_tokens == 16 * K and packing.chunks == 2
    assert 2 * K <= best.packing_tokens < 8 * K and best.chunks >= 4
    assert packing.seconds / best.seconds > 1.2


@given(st.lists(st.integers(64, 20_000), min_size=1, max_size=24), st.integers(0, 40_000))
@settings(max_examples=40)
@pytest.mark.everything
def test_it_is_the_best_of_its_lengths_and_epp_is_no_slower(lengths, context) -> None:
    options = Options(context=context, effort=0)
    found = PLANNERS[BEST](lengths, COST, options)
    tokens = list(packing_lengths(max(lengths), context))
    assert tokens[0] >= max(lengths) and tokens[-1] == max(context, max(lengths))
    each = [PLANNERS["packing"](lengths, COST, Options(context=one)) for one in tokens]
    fitting = [one for one in each if one.fits]
    assert found.seconds == min(one.seconds for one in fitting or [found])
    assert found.packing_tokens in tokens
    if found.fits:
        assert PLANNERS["epp"](lengths, COST, options).seconds <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "layout", "hidden"),
    [
        ("llama3-8b", {"tp": 4}, TENSOR),
        ("qwen3-30b-a3b", {"ep": 8, "dp": 8}, EXPERTS),
        ("llama3-8b", {"cp": 4}, 0.0),
    ],
)
def test_overlaps_hide_their_fraction_of_an_exchange(model, layout, hidden) -> None:
    cost = named_cost(model, "h100-80g", pp=2, zero=1, **layout)
    exposed, rest = (
        each.seconds.communication_per(Kind.FORWARD) for each in (cost, overlapped(cost))
    )
    assert exposed.sum() > 0
    assert rest == pytest.approx(exposed * (1 - hidden))
    assert overlaps(cost) == (hidden > 0)
