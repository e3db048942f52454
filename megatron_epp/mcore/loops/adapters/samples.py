"""Adapter for padded samples, as Megatron's ``pretrain_gpt.py`` draws them.

    tokens, labels, loss_mask, ...   [B, S]: B samples, the shorter ones padded to S

Megatron's own ``get_batch`` broadcasts tensors of the full sequence length over the tensor-parallel
ranks, so it cannot return slices. :func:`samples_forward_step` does not call ``get_batch``: every
rank with an iterator draws its slices. Every sample is a document, whose tokens attend to the
earlier tokens of the sample.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_epp.mcore.loops.adapter import LOSS_KEYS, parts_of

# loss_of(micro-batch, outputs [B, S, ...]) returns what the loop's own loss function returns
LossOf = Callable[..., Any]


class Samples:
    """Adapter for micro-batches of padded samples.

    The entry "lengths" of a micro-batch contains the length of each sample. Without this entry, a
    sample ends at its last token that the loss mask includes. Without a loss mask, every sample has
    all S tokens of the padded tensors [B, S].

    Attributes:
        loss_of: Function (micro-batch, outputs [B, S, ...]) that returns what the loop's loss
            function returns. If the loop collects results other than losses, it also receives
            ``non_loss_data=True``. Default: :func:`masked_sum`.
        keys: Names of the entries that forward steps draw; missing entries are skipped.
        loss_keys: Names of entries that may differ in a shared prefix: only the loss reads them.
    """

    def __init__(
        self,
        loss_of: LossOf | None = None,
        keys: Sequence[str] = ("tokens", "labels", "loss_mask"),
        loss_keys: Sequence[str] = LOSS_KEYS,
    ):
        self.loss_of = masked_sum if loss_of is None else loss_of
        self.keys, self.loss_keys = tuple(keys), tuple(loss_keys)

    def lengths(self, micro_batch: Mapping[str, Any]) -> Sequence[int]:
        """Return the number of tokens of every sample, without padding."""
        if "lengths" in micro_batch:
            return tuple(map(int, micro_batch["lengths"]))
        samples, rows = micro_batch["tokens"].shape[:2]
        mask = micro_batch.get("loss_mask")
        if mask is None:
            return (rows,) * samples
        # Tokens after the last target are not needed.
        places = torch.arange(1, rows + 1, device=mask.device)
        return tuple(max(1, int((places * (row != 0)).max())) for row in mask)

    def rows(
        self, micro_batch: Mapping[str, Any], document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Return tokens [start, stop) of a sample: a tensor [1, t, ...] for each of ``keys``."""
        rows = slice(document, document + 1), slice(start, stop)
        return parts_of(micro_batch, self.keys, rows)

    def loss(
        self,
        micro_batch: Mapping[str, Any],
        outputs: Sequence[Tensor],
        non_loss_data: bool = False,
    ) -> Any:
        """Call ``loss_of`` with the outputs padded to [B, S, ...], and return its result."""
        laid_out = self.laid_out(micro_batch, outputs)
        if non_loss_data:
            return self.loss_of(micro_batch, laid_out, non_loss_data=True)
        return self.loss_of(micro_batch, laid_out)

    def laid_out(self, micro_batch: Mapping[str, Any], outputs: Sequence[Tensor]) -> Tensor:
        """Return the documents' outputs as one tensor [B, S, ...], padded with zeros."""
        rows = micro_batch["tokens"].shape[1]
        padded = pad_sequence(list(outputs), batch_first=True)
        missing = rows - padded.shape[1]
        if missing > 0:
            zeros = padded.new_zeros(padded.shape[0], missing, *padded.shape[2:])
            padded = torch.cat([padded, zeros], dim=1)
        return padded


def masked_sum(
    micro_batch: Mapping[str, Any], token_losses_BS: Tensor, non_loss_data: bool = False
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss summed over unmasked tokens, the number of these tokens, and a report.

    The micro-batch must have an entry ``loss_mask`` [B, S]; ``non_loss_data`` has no effect. The
    report for the log is {"lm loss": [sum, number]}, as in Megatron's own loss function.
    """
    mask_BS = micro_batch["loss_mask"].to(token_losses_BS.dtype)
    total = (token_losses_BS * mask_BS).sum()
    tokens = mask_BS.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {"lm loss": report}


def samples_forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """Run the model on the next micro-batch: a forward step for loops that do not have one.

    Return the losses [B, S], and :func:`masked_sum` bound to the micro-batch as the loss function.
    """
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch.get("position_ids"), batch.get("attention_mask"),
        labels=batch["labels"],
    )  # fmt: skip
    return output, partial(masked_sum, batch)
