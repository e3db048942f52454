"""Attention of a chunk with some documents on single context-parallel ranks, and some sharded.

    rows of rank 0        | a a a | b b b b |        a: a document sharded over all ranks
    rows of rank 1        | a a a | c c c . |        b, c: documents on one rank each; .: padding
                          exchanged  all heads here

The two parts are computed separately. The first part is this rank's rows of sharded documents: the
ranks exchange these rows for heads. The second part is the documents on this rank alone, with all
heads and without an exchange. If no document is sharded, nothing is exchanged.

Shape suffixes: t rows of this rank, s of them exchanged; T = N s exchanged rows of all N ranks; H
query heads, G key heads, D head size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_epp.layers.attention.ulysses import RowsRecompute, Ulysses
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import RecomputeHandle

# Function from (q, k, v) to the output and the handle that recomputes it (None if not dropped).
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, RecomputeHandle | None]]


def sharded_rows(state: ChunkState, ulysses: Ulysses) -> int:
    """Return the number of rows of sharded documents on this rank, which precede all others."""
    return state.tokens // ulysses.group.size()


def attention_parts(
    ulysses: Ulysses, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor, state: ChunkState
) -> tuple[Tensor, ...]:
    """Exchange rows of Q, K and V of the sharded documents for heads, by an all-to-all.

    The first three tensors are Q, K and V of the sharded documents, with all rows and this rank's
    heads: [T, H / N, D] and twice [T, max(1, G / N), D]. The next three are Q, K and V of the
    documents that this rank computes alone, with all heads: [own rows, heads, head size]. If the
    chunk has only one of these kinds of documents, only its three tensors are returned.

    Args:
        ulysses: the all-to-all.
        q_tHD: [rows, heads, head size] queries of this rank's rows.
        k_tGD: [rows, groups, head size] keys of this rank's rows.
        v_tGD: [rows, groups, head size] values of this rank's rows.
        state: state of the chunk.
    """
    qkv = q_tHD, k_tGD, v_tGD
    if state.local is None:
        return ulysses.to_heads(*qkv)
    sharded_count = sharded_rows(state, ulysses)
    if not sharded_count:
        return qkv
    # A view would keep the exchanged rows alive.
    local = (x[sharded_count:].clone() for x in qkv)
    return (*ulysses.to_heads(*(x[:sharded_count] for x in qkv)), *local)


def attend_parts(
    parts: Sequence[Tensor],
    state: ChunkState,
    ulysses: Ulysses | None,
    sharded: Attend,
    local: Attend,
) -> tuple[Tensor, RecomputeHandle | None]:
    """Compute attention on the result of :func:`attention_parts`, and exchange heads for rows.

    Return the output [t, H, D] of this rank's rows, and the handle that recomputes the output (None
    if the output is saved).

    Args:
        parts: tensors of :func:`attention_parts`, or Q, K and V without context parallelism.
        state: state of the chunk.
        ulysses: the all-to-all; None without context parallelism.
        sharded: attention of the sharded documents.
        local: attention of the documents on this rank alone.
    """
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
    """Recompute handle of an output: first rows of sharded, then of single-rank documents."""

    def __init__(self, sharded: RecomputeHandle, local: RecomputeHandle):
        self._sharded_rows, self._local = sharded, local
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        if self._value is None:
            self._value = torch.cat((self._sharded_rows.value(), self._local.value()))
        return self._value
