"""Micro-batches of samples side by side, as Megatron's ``pretrain_gpt.py`` draws them.

    tokens, labels, loss_mask, ...   [B, S]: B samples, the shorter ones padded to S

Megatron's own ``get_batch`` hands on tensors of the whole context among tensor-parallel ranks, into
which no slice fits: :func:`samples_forward_step` takes slices as they are drawn, on every rank that
has an iterator. Every sample is a document: tokens within it attend to those before them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.mcore.loops.adapter import LOSS_KEYS, parts_of, shared_prefixes_of

# loss_of(micro-batch, outputs [B, S, ...]) as the loop's own loss function returns it
LossOf = Callable[..., Any]


class Samples:
    """lengths: "lengths" of the micro-batch where it has them, else those up to a sample's last
    token that carries a loss, else S. loss_of: the loop's loss on [B, S]; default: Megatron's sum
    over unmasked tokens.

    keys         what forward steps draw, as far as micro-batches have it
    share_from   tokens that samples must have in common, from their first on, for what they share
                 to be computed once; 0: every sample is computed by itself
    loss_keys    those of the keys that may differ in what is shared, as the loss alone reads them
    """

    def __init__(
        self,
        loss_of: LossOf | None = None,
        keys: Sequence[str] = ("tokens", "labels", "loss_mask"),
        share_from: int = 0,
        loss_keys: Sequence[str] = LOSS_KEYS,
    ):
        self.share_from, self.loss_keys = share_from, tuple(loss_keys)
        self.loss_of = masked_sum if loss_of is None else loss_of
        self.keys = tuple(keys)

    def lengths(self, micro_batch: Mapping[str, Any]) -> Sequence[int]:
        if "lengths" in micro_batch:
            return tuple(map(int, micro_batch["lengths"]))
        samples, rows = micro_batch["tokens"].shape[:2]
        mask = micro_batch.get("loss_mask")
        if mask is None:
            return (rows,) * samples
        # Behind its last target a sample's tokens are nobody's context.
        places = torch.arange(1, rows + 1, device=mask.device)
        return tuple(max(1, int((places * (row != 0)).max())) for row in mask)

    def prefixes(self, micro_batch: Mapping[str, Any]) -> PrefixForest:
        return shared_prefixes_of(self, micro_batch, self.share_from)

    def rows(
        self, micro_batch: Mapping[str, Any], document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        rows = slice(document, document + 1), slice(start, stop)
        return parts_of(micro_batch, self.keys, rows)

    def loss(
        self,
        micro_batch: Mapping[str, Any],
        outputs: Sequence[Tensor],
        non_loss_data: bool = False,
    ) -> Any:
        laid_out = self.laid_out(micro_batch, outputs)
        if non_loss_data:
            return self.loss_of(micro_batch, laid_out, non_loss_data=True)
        return self.loss_of(micro_batch, laid_out)

    def laid_out(self, micro_batch: Mapping[str, Any], outputs: Sequence[Tensor]) -> Tensor:
        """Return the documents' outputs as rows of the micro-batch; those of padding are 0."""
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
    """Megatron's: the loss summed over unmasked tokens, their number, and both for the log."""
    mask_BS = micro_batch["loss_mask"].to(token_losses_BS.dtype)
    total = (token_losses_BS * mask_BS).sum()
    tokens = mask_BS.sum().to(torch.int)
    report = torch.stack([total.detach(), tokens.to(total.dtype)])
    return total, tokens, {"lm loss": report}


def samples_forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """A forward step for loops that have none of their own: losses of the tokens drawn."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch.get("position_ids"), batch.get("attention_mask"),
        labels=batch["labels"],
    )  # fmt: skip
    return output, partial(masked_sum, batch)
