"""The exchange of rows for heads, on gloo ranks, against plain slices of whole tensors."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_epp.layers.attention.local import attend_parts, attention_parts
from megatron_epp.layers.attention.ulysses import RowsRecompute, Ulysses, refuse_heads
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.runtime.kv_store import Store

RANKS, ROWS, HEADS, SIZE = 4, 12, 8, 3
GROUPS = (8, 4, 2, 1)  # key heads: two a rank, one, and shared by two and by four ranks


def made(heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, heads, SIZE, generator=generator, dtype=torch.float64)


def rank_main(rank: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    meeting = Path(folder, "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        ulysses = Ulysses(dist.group.WORLD)
        rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        heads = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
        for groups in GROUPS:
            check_heads(ulysses, groups, rank, rows, heads)
        check_rows(ulysses, rows, heads)
    finally:
        dist.destroy_process_group()


def check_heads(ulysses: Ulysses, groups: int, rank: int, rows: slice, heads: slice) -> None:
    whole = [made(HEADS, 1), made(groups, 2), made(groups, 3)]
    mine = [x[rows].clone().requires_grad_() for x in whole]
    q, k, v = ulysses.to_heads(*mine)
    assert torch.equal(q, whole[0][:, heads])
    # Query head h attends to key head h G / H.
    attend_parts = sorted({head * groups // HEADS for head in range(heads.start, heads.stop)})
    assert torch.equal(k, whole[1][:, attend_parts])
    assert torch.equal(v, whole[2][:, attend_parts])
    weights = made(HEADS, 4)
    repeated = HEADS // RANKS // k.shape[1]
    shared = sum(x.repeat_interleave(repeated, 1) for x in (k, v))
    ((q + shared) * weights[:, heads]).sum().backward()
    assert torch.equal(mine[0].grad, weights[rows])
    summed = weights[rows].unflatten(1, (groups, -1)).sum(2)
    for x in mine[1:]:
        torch.testing.assert_close(x.grad, summed, rtol=1e-14, atol=1e-14)


def check_rows(ulysses: Ulysses, rows: slice, heads: slice) -> None:
    whole, weights = made(HEADS, 5), made(HEADS, 6)
    mine = whole[:, heads].clone().requires_grad_()
    out = ulysses.to_rows(mine)
    assert out.is_contiguous() and torch.equal(out, whole[rows])
    (out * weights[rows]).sum().backward()
    assert torch.equal(mine.grad, weights[:, heads])

    class Promised:
        times = 0

        def value(self) -> torch.Tensor:
            self.times += 1
            return mine.detach()

    promised = Promised()
    again = RowsRecompute(ulysses, promised)
    assert torch.equal(again.value(), whole[rows])
    assert again.value() is again.value() and promised.times == 1


@pytest.mark.everything
def test_rows_become_heads_and_back(tmp_path) -> None:
    torch.multiprocessing.spawn(rank_main, (str(tmp_path),), nprocs=RANKS)


def test_heads_that_do_not_divide_are_refused() -> None:
    refuse_heads(8, 8, 4)
    refuse_heads(8, 2, 4)
    with pytest.raises(ValueError, match=r"6 attention heads .* over 4"):
        refuse_heads(6, 6, 4)
    with pytest.raises(ValueError, match=r"3 key/value heads .* over 2"):
        refuse_heads(6, 3, 2)


# ------------------------------------------------------------------ local documents


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
    ("spread", "local", "exchanged"),
    [(12, None, [6]), (0, 6, []), (8, 2, [4])],
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
