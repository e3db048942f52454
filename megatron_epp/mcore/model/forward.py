"""Forward step and loss of one chunk, as Megatron's trainer calls them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.data.chunk_batches import ChunkBatch
from megatron_epp.mcore.lm_head.fused_head import FusedHead
from megatron_epp.mcore.lm_head.head import HiddenStates


def chunk_forward_step(batches: Iterator[ChunkBatch], model: Any) -> tuple[Tensor, Any]:
    """Run the forward of one chunk on this stage; a forward step for Megatron's schedules.

    Args:
        batches: Iterator whose next item is the chunk's inputs.
        model: Stage module.

    Returns:
        The model's output, and the loss function, which only the last stage calls.
    """
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
    return output, partial(chunk_loss, batch.loss_mask, mtp_mask_DT=batch.mtp_mask)


def chunk_loss(
    loss_mask_1T: Tensor | None,
    token_losses_1T: Tensor,
    *,
    mtp_mask_DT: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss summed over unmasked tokens, the number of these tokens, and a report.

    With D MTP layers, losses and weights have shape [1 + D, T], and the sum covers all rows. The
    report contains one entry (sum of losses, number of labels) per row, under Megatron's names.

    Megatron divides the loss once per iteration, by the tokens of the global batch
    (--calculate-per-token-loss). For its log, Megatron divides each entry without a check for 0. So
    a tiny number is added to the token count, which changes only a count of 0.

    Args:
        loss_mask_1T: [1, tokens] Weights of the tokens' losses in the sum.
        token_losses_1T: [1, tokens] Losses of the tokens.
        mtp_mask_DT: [MTP layers, tokens] 1 for each MTP label with a loss; None without MTP.
    """
    assert loss_mask_1T is not None, "the last stage has one"
    dtype = torch.promote_types(token_losses_1T.dtype, torch.float32)
    weighted = token_losses_1T.to(dtype) * loss_mask_1T.to(dtype)
    total, tokens = weighted.sum(), loss_mask_1T[0].sum().to(torch.int)
    tiny = torch.finfo(total.dtype).tiny
    report = {"lm loss": torch.stack([weighted[0].detach().sum(), tokens.to(total.dtype) + tiny])}
    if mtp_mask_DT is not None:
        mask_DT = mtp_mask_DT.to(dtype)
        sums_D = (token_losses_1T[1:].detach().to(dtype) * mask_DT).sum(1)
        for depth, pair in enumerate(zip(sums_D, mask_DT.sum(1) + tiny, strict=True), start=1):
            report[f"mtp_{depth} loss"] = torch.stack(pair)
    return total, tokens, report
