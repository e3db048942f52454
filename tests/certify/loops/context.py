"""Training loop whose forward step shards a micro-batch over context-parallel ranks.

    padded samples          [B, S]: each sample is cut into 2 x ranks equal parts; rank i has parts
                            i and 2 x ranks - 1 - i, as in Megatron's get_batch_on_this_cp_rank
    documents in one row    [1, T]: every document is cut in this way (THD, packed_seq_params)

Some loops sum the token losses of a rank locally. Other loops gather the token losses, and compute
a loss of full sequences. This loop does both. On a CPU-only host, Megatron has no attention over
context-parallel ranks. A simple attention replaces it: it gathers K and V and computes all scores.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from megatron_epp.layers.zigzag import zigzag
from tests.certify.loops.micro_batches import MicroBatch, loop_loss

_CUT = ("tokens", "labels", "position_ids")
Parts = Sequence[Tensor]  # the rows of every rank


def context_forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Run the model on this rank's shard; this is the ``forward_step_func`` of the loop."""
    batch = next(data_iterator)
    local = _on_this_rank(batch)
    params = None
    if "cu_seqlens" in batch:
        starts = batch["cu_seqlens"].int()
        longest = int(starts.diff().max())
        params = PackedSeqParams("thd", starts, starts, starts, starts, longest, longest)
    output = model(
        local["tokens"],
        local["position_ids"],
        None,
        labels=local["labels"],
        packed_seq_params=params,
    )
    return output, lambda losses, **named: _loss(batch, losses, **named)


def _on_this_rank(batch: MicroBatch) -> dict[str, Tensor]:
    group = mpu.get_context_parallel_group()
    full = {name: batch[name] for name in _CUT}
    if "cu_seqlens" not in batch:
        return get_batch_on_this_cp_rank({**full, "cu_seqlens": None}, False, group)
    # Megatron's own function for THD calls Transformer Engine, which needs a GPU.
    rows = _parts(batch["cu_seqlens"])[group.rank()]
    return {name: tensor.index_select(1, rows) for name, tensor in full.items()}


def _parts(starts: Tensor) -> Parts:
    """Return the row indices of every rank; ``starts`` are boundaries of documents, in rows."""
    ranks = mpu.get_context_parallel_world_size()
    pairs = list(pairwise(starts.tolist()))
    return [torch.cat([a + zigzag(b - a, ranks)[rank] for a, b in pairs]) for rank in range(ranks)]


def _loss(batch: MicroBatch, local_losses: Tensor, non_loss_data: bool = False) -> Any:
    """Return the loop's loss, given this rank's token losses [B, S / ranks] or [1, T / ranks]."""
    group = mpu.get_context_parallel_group()
    packed = "cu_seqlens" in batch
    parts = _parts(batch["cu_seqlens"] if packed else torch.tensor([0, batch["tokens"].shape[1]]))
    if batch["loss"] == "tokens" and not non_loss_data:
        mask = batch["loss_mask"].index_select(1, parts[group.rank()]).to(local_losses.dtype)
        total = (local_losses * mask).sum()
        everywhere = total.detach().clone()
        dist.all_reduce(everywhere, group=group)
        return total, mask.sum().to(torch.int), {"value": everywhere.item()}
    losses = _Gathered.apply(local_losses, parts, group)
    if packed:
        each = losses[0].split(batch["cu_seqlens"].diff().tolist())
        batch, losses = batch["side by side"], pad_sequence(list(each), batch_first=True)
    result = loop_loss(batch, losses, non_loss_data)
    if non_loss_data or len(result) == 2:
        return result
    loss, count, report = result  # tokens are counted on one rank only
    return loss, count if group.rank() == 0 else torch.zeros_like(count), report


class _Gathered(Function):
    """Gather of the [B, s] shards of all ranks to [B, S]; backward selects this rank's rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, parts: Parts, group: Any) -> Tensor:
        ctx.rows = parts[group.rank()]
        every = [torch.empty_like(local) for _ in parts]
        dist.all_gather(every, local.contiguous(), group=group)
        gathered = local.new_empty(len(local), sum(map(len, parts)))
        for rows, part in zip(parts, every, strict=True):
            gathered[:, rows] = part
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(1, ctx.rows), None, None


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
