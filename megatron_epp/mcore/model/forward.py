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
    """Return the loss summed over unmasked tokens, the number of these tokens, and a report.

    With D MTP layers, losses and weights have shape [1 + D, T], and the sum covers all rows. The
    report contains one entry (sum, divisor) per row, under Megatron's names. In an MTP entry,
    the sum adds the documents' mean losses, and the divisor is ``documents``.

    Megatron divides the loss once per iteration, by the tokens of the global batch
    (--calculate-per-token-loss). For its log, Megatron divides each entry without a check for 0. So
    a tiny number is added to the token count, which changes only a count of 0.

    Args:
        loss_mask_1T: Weights of the tokens' losses in the sum.
        token_losses_1T: Losses of the tokens.
        means_DT: Weights of the MTP losses in the report; None without MTP.
        documents: Number of documents that begin in these rows.
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
