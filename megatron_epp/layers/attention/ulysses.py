"""DeepSpeed Ulysses: with context parallelism, each rank attends over all rows with some heads.

The tokens of a chunk are sharded over N context-parallel ranks, but attention needs all tokens of a
document. An all-to-all before the attention and an all-to-all after it exchange rows for heads:

    rank r outside   rows [r T/N, (r+1) T/N) of the chunk, all H query and G key heads
    rank r inside    all T rows, query heads [r H/N, (r+1) H/N) and their key heads

The K/V cache is thus sharded by heads. With fewer key heads than ranks, several ranks get a copy of
the same key head, and their gradients of this head are summed.

T is the number of rows of the padded chunk, t = T/N the number of rows of this rank, and D the head
size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.layers.recompute.outputs import RecomputeHandle


def refuse_heads(heads: int, groups: int, ranks: int) -> None:
    """Raise a ValueError if query or key heads cannot be distributed evenly over ``ranks``."""
    if heads % ranks:
        raise ValueError(
            f"{heads} attention heads of a tensor-parallel rank do not divide over {ranks} "
            "context-parallel ranks, which attend to some heads each; expected a multiple"
        )
    if groups % ranks and ranks % groups:
        raise ValueError(
            f"{groups} key/value heads of a tensor-parallel rank neither divide over {ranks} "
            "context-parallel ranks nor into them; expected a multiple or a divisor"
        )


@dataclass(frozen=True, slots=True)
class Ulysses:
    """All-to-alls between rows and heads within ``group``; one object serves all layers."""

    group: dist.ProcessGroup

    def to_heads(self, q_tHD: Tensor, k_tGD: Tensor, v_tGD: Tensor) -> tuple[Tensor, ...]:
        """Exchange this rank's rows of q, k and v for all rows of this rank's heads (all-to-all).

        The arguments have t rows, H query heads and G key heads of size D. With N ranks, return q
        [T, H/N, D], and k and v [T, max(1, G/N), D], where T is the number of rows of all ranks.
        """
        return self.each_to_heads((q_tHD, k_tGD, v_tGD))

    def each_to_heads(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Exchange this rank's rows [t, H, D] of tensors for its heads [T, H/N, D] (all-to-all).

        If there are fewer heads than ranks, heads are repeated first, so that each rank has a head.
        """
        ranks = self.group.size()
        shared = (
            x if x.shape[1] >= ranks else x.repeat_interleave(ranks // x.shape[1], dim=1)
            for x in tensors
        )
        return _ToHeads.apply(self.group, *shared)

    def to_rows(self, out_THD: Tensor) -> Tensor:
        """Exchange this rank's heads [T, H/N, D] of the output for its rows [t, H, D]."""
        return _ToRows.apply(self.group, out_THD)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _rows_to_heads(tensors, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        return None, *_heads_to_rows(gradients, ctx.group)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
        ctx.group = group
        return _heads_to_rows((tensor,), group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        return None, *_rows_to_heads((gradient,), ctx.group)


def _rows_to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange this rank's rows [t, N h, D] of each tensor for its heads [T, h, D]."""
    # [t, N, h, D] -> [N, t, h, D]: what goes to one rank is contiguous.
    parts = [x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous() for x in tensors]
    return tuple(x.flatten(0, 1) for x in _exchange(parts, group))


def _heads_to_rows(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchange this rank's heads [T, h, D] of each tensor for its rows [t, N h, D]."""
    parts = [x.contiguous().unflatten(0, (group.size(), -1)) for x in tensors]
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in _exchange(parts, group))


def _exchange(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Run an all-to-all of every tensor [N, ...]: part n goes to rank n of the group.

    All messages are issued before the first wait. On a GPU, the stream waits, not the host.
    """
    received = [torch.empty_like(part) for part in parts]
    works = [
        dist.all_to_all_single(into, part, group=group, async_op=True)
        for into, part in zip(received, parts, strict=True)
    ]
    for work in works:
        work.wait()
    return received


class RowsRecompute:
    """Recompute handle of an attention output; it repeats the attention and the all-to-all.

    All ranks use their handles in the same order, the order of the backward.
    """

    def __init__(self, ulysses: Ulysses, recompute: RecomputeHandle):
        self._ulysses, self._again = ulysses, recompute
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """Return the recomputed output [t, H, D], cached; the first call is a collective."""
        if self._value is None:
            (self._value,) = _heads_to_rows((self._again.value(),), self._ulysses.group)
        return self._value
