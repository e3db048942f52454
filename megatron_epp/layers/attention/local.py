"""Attention of a chunk of which ranks compute some documents alone, beside those that are spread.

    rows of rank 0        | a a a | b b b b |        a: a document over all ranks
    rows of rank 1        | a a a | c c c . |        b, c: local ones; .: padding
                          exchanged  all heads here

Each part is attended to for itself: in front its share of the rows that all ranks exchange for
heads, behind them this rank's documents with every head, and without any exchange. Where nothing is
spread, nothing is exchanged.

t rows of this rank, s of them exchanged; T = N s with those of all N ranks; H query heads, G key
heads, D head size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_epp.layers.attention.ulysses import RowsRecompute, Ulysses
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import RecomputeHandle

# (q, k, v) to the output, and the handle that recomputes it where it is to be dropped.
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, RecomputeHandle | None]]


def sharded_rows(state: ChunkState, ulysses: Ulysses) -> int:
    """s: of this rank's rows those that are exchanged, the first ones."""
    return state.tokens // ulysses.group.size()


def attention_parts(
    ulysses: Ulysses, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, state: ChunkState
) -> tuple[Tensor, ...]:
    """Q, K and V of what is spread, of all rows and some heads; behind them those of what is local,
    of its rows and all heads. Three tensors where there is one of the two only."""
    qkv = q_tHD, k_tGD, v_tGD
    if state.local is None:
        return ulysses.to_heads(*qkv)
    sharded_count = sharded_rows(state, ulysses)
    if not sharded_count:
        return qkv
    # A view of the local rows would keep those alive that have been exchanged.
    local = (x[sharded_count:].clone() for x in qkv)
    return (*ulysses.to_heads(*(x[:sharded_count] for x in qkv)), *local)


def attend_parts(
    parts: Sequence[Tensor],
    state: ChunkState,
    ulysses: Ulysses | None,
    sharded: Attend,
    local: Attend,
) -> tuple[Tensor, RecomputeHandle | None]:
    """The output of this rank's rows [t, H, D], by ``sharded`` and ``local``, from the ``parts`` of
    :func:`attention_parts`; from Q, K and V as they are where there is no exchange."""
    if ulysses is None:
        return sharded(*parts)
    if state.local is not None and not state.tokens:
        return local(*parts)
    out_THD, recompute = sharded(*parts[:3])
    out_sHD = ulysses.to_rows(out_THD)
    recompute = None if recompute is None else RowsRecompute(ulysses, recompute)
    if state.local is None:
        return out_sHD, recompute
    local_out, local_recompute = local(*parts[3:])
    out_tHD = torch.cat((out_sHD, local_out))
    if recompute is None or local_recompute is None:
        return out_tHD, None
    return out_tHD, _JoinedRecompute(recompute, local_recompute)


class _JoinedRecompute:
    """The handle of an output of both parts."""

    def __init__(self, sharded: RecomputeHandle, local: RecomputeHandle):
        self._sharded_rows, self._local = sharded, local
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        if self._value is None:
            self._value = torch.cat((self._sharded_rows.value(), self._local.value()))
        return self._value
