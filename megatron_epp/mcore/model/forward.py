"""The forward step and the loss that Megatron's trainer is given, on one chunk."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.data.chunk_batches import ChunkBatch
from megatron_epp.mcore.lm_head.fused_head import FusedHead
from megatron_epp.mcore.lm_head.head import HiddenStates


def chunk_forward_step(batches: Iterator[ChunkBatch], model: Any) -> tuple[Tensor, Any]:
    """One chunk through this stage: its output, and the loss function for the last stage."""
    batch = next(batches)
    processor: Any = None
    if batch.hidden_only:
        processor = HiddenStates.after_the_norm
    elif batch.known_gradient is not None:
        processor = FusedHead(batch.known_gradient)
    output = model(
        batch.tokens,
        batch.positions,
        None,
        labels=batch.labels,
        packed_seq_params=batch.params,
        output_processor=processor,
    )
    if batch.means is None:
        return output, partial(chunk_loss, batch.loss_mask)
    return output, partial(
        chunk_loss, batch.loss_mask, means_DT=batch.means, documents=batch.documents
    )


def chunk_loss(
    loss_mask_1T: Tensor | None,
    token_losses_1T: Tensor,
    *,
    means_DT: Tensor | None = None,
    documents: int = 0,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss summed over the chunk's unmasked tokens, their number, and both for the log.

    Where D further tokens are predicted, losses and weights are [1 + D, T]: the sum is of all, what
    is logged of each alone, of the further ones a mean over ``documents`` under Megatron's names.

    The divisor comes once per iteration, over the whole global batch (--calculate-per-token-loss).
    Megatron's log divides without a look, so the number that it gets is never exactly zero: a batch
    without any target has the loss 0, and no other number is changed by it.
    """
    assert loss_mask_1T is not None, "the last stage has one"
    dtype = torch.promote_types(token_losses_1T.dtype, torch.float32)
    weighted = token_losses_1T.to(dtype) * loss_mask_1T.to(dtype)
    total, tokens = weighted.sum(), loss_mask_1T[0].sum().to(torch.int)
    divisor = tokens.to(total.dtype) + torch.finfo(total.dtype).tiny
    report = {"lm loss": torch.stack([weighted[0].detach().sum(), divisor])}
    if means_DT is not None:
        means_D = (token_losses_1T[1:].detach().to(dtype) * means_DT.to(dtype)).sum(1)
        for depth, mean in enumerate(means_D, start=1):
            report[f"mtp_{depth} loss"] = torch.stack([mean, torch.full_like(mean, documents)])
    return total, tokens, report
