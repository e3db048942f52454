"""Attention over context-parallel ranks on a CPU-only host, where Megatron has none.

It gathers K and V, and computes all scores. Rows are cut as Megatron cuts them:

    padded samples          [B, S]: each sample is cut into 2 x ranks equal parts; rank i has parts
                            i and 2 x ranks - 1 - i, as in Megatron's get_batch_on_this_cp_rank
    documents in one row    [1, T]: every document is cut in this way (THD, packed_seq_params)
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_epp.layers.zigzag import zigzag


def attend_over_ranks(model: Any) -> None:
    """Patch the attention of ``model`` to attend over documents sharded over CP ranks."""
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.forward = _GatheredAttention(core.softmax_scale)


class _GatheredAttention:
    """Attention that gathers K and V from all context-parallel ranks.

    In shapes, s is the number of rows on this rank, S the number on all ranks, b the number of
    samples (1 if documents are in one row), and D the head size.
    """

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **ignored: Any,
    ) -> Tensor:
        group = mpu.get_context_parallel_group()
        if packed_seq_params is not None:  # [t, heads, D]
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_SbGD, value_SbGD = (_RowsOfAll.apply(x, group) for x in (key, value))
        starts = torch.tensor([0, len(key_SbGD)])
        if packed_seq_params is not None:
            starts = packed_seq_params.cu_seqlens_q.long()
        parts = _parts(starts)
        local_s1, all_1S = parts[group.rank()][:, None], torch.cat(list(parts))[None]
        document_s1, document_1S = (
            torch.bucketize(rows, starts, right=True) for rows in (local_s1, all_1S)
        )
        out_bHsD = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key_SbGD.permute(1, 2, 0, 3),
            value_SbGD.permute(1, 2, 0, 3),
            attn_mask=(local_s1 >= all_1S) & (document_s1 == document_1S),
            scale=self.scale,
            enable_gqa=True,
        )
        out_sbX = out_bHsD.permute(2, 0, 1, 3).flatten(2)
        return out_sbX if packed_seq_params is None else out_sbX.squeeze(1)


class _RowsOfAll(Function):
    """Concatenation of the [s, ...] shards of all ranks; backward sums all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, len(local)
        every = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(every, local.contiguous(), group=group)
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.rows)[ctx.group.rank()], None


def _parts(starts: Tensor) -> Sequence[Tensor]:
    """Return the row indices of every rank; ``starts`` are boundaries of documents, in rows."""
    ranks = mpu.get_context_parallel_world_size()
    pairs = list(pairwise(starts.tolist()))
    return [torch.cat([a + zigzag(b - a, ranks)[rank] for a, b in pairs]) for rank in range(ranks)]
