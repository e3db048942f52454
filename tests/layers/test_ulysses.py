"""Rows of documents on one context-parallel rank are not exchanged. What is exchanged, and its
gradients: the certificates over context-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_epp.layers.attention.local import attend_parts, attention_parts
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.runtime.kv_store import Store

ROWS, HEADS, SIZE = 12, 8, 3


def made(heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, heads, SIZE, generator=generator, dtype=torch.float64)


class Recorded:
    """In the place of an exchange between two ranks: notes what goes through it."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(size=lambda: 2)
        self.rows: list[int] = []

    def to_heads(self, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.rows.append(len(qkv[0]))
        return tuple(x.repeat(2, 1, 1).unflatten(1, (2, -1))[:, 0] for x in qkv)

    def to_rows(self, out: torch.Tensor) -> torch.Tensor:
        return out[: len(out) // 2].repeat_interleave(2, 1)


def state_of(spread: int, local: int | None) -> ChunkState:
    """Of a chunk of which ranks exchange so many rows in all, and this one has so many local."""
    state = ChunkState(0, (), spread, "k", Store({}))
    if local is not None:
        state.local = ChunkState(0, (), local, "k", Store({}))
    return state


@pytest.mark.parametrize(
    ("spread", "local", "exchanged"), [(12, None, [6]), (0, 6, []), (8, 2, [4])]
)
def test_only_rows_that_are_spread_are_exchanged(spread, local, exchanged) -> None:
    qkv = [made(HEADS, seed)[:6] for seed in (1, 2, 3)]
    state, ulysses = state_of(spread, local), Recorded()
    parts = attention_parts(ulysses, *qkv, state)
    assert ulysses.rows == exchanged
    seen = []

    def attend(name: str):
        def one(q, k, v):
            seen.append((name, *q.shape[:2]))
            return q, None

        return one

    out, again = attend_parts(parts, state, ulysses, attend("spread"), attend("local"))
    assert again is None and out.shape == qkv[0].shape
    expected = [("spread", spread, HEADS // 2)] * bool(spread)
    assert seen == expected + [("local", local, HEADS)] * bool(local)
    if local:  # as they are, behind what was spread
        assert torch.equal(out[len(out) - local :], qkv[0][len(out) - local :])
