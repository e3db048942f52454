"""Adapter for a framework that has none in this package (SkyRL, AReaL, ROLL, miles).

The micro-batches of this example hold left-padded sequences, and the framework's forward step takes
the padding off. An adapter says where the documents are, and computes the framework's loss from the
outputs of full documents:

    made = megatron_epp.attach(model, OwnAdapter())     # after the model is wrapped

The shapes are B samples of at most S tokens, and t tokens of a slice.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MicroBatch = Mapping[str, Tensor]


def policy_loss(batch: MicroBatch, losses_BS: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return a mean over sequences of their mean token losses, weighted by advantages."""
    mask_BS = batch["attention_mask"].to(losses_BS.dtype)
    each_B = batch["advantages"] * (losses_BS * mask_BS).sum(1) / mask_BS.sum(1)
    return each_B.mean(), {"loss": each_B.mean().item()}


def sliced_step(rows: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    """Run ``model`` on the rows of a slice: one loss for each token on the last stage."""
    drawn = next(rows)
    return model(drawn["tokens"], None, None, labels=drawn["labels"]), None


class OwnAdapter:
    """Documents, rows and loss of the framework's micro-batches."""

    def lengths(self, batch: MicroBatch) -> Sequence[int]:
        """Return the number of tokens of every document, without padding."""
        return batch["attention_mask"].sum(1).tolist()

    def rows(self, batch: MicroBatch, document: int, start: int, stop: int) -> MicroBatch:
        """Return tokens [start, stop) of a document as tensors [1, t] for the forward step."""
        kept = batch["attention_mask"][document].bool()
        tokens = batch["sequences"][document][kept]
        labels = tokens.roll(-1)  # of the full document: a slice's last label is the next slice's
        return {"tokens": tokens[None, start:stop], "labels": labels[None, start:stop]}

    def sliced(self, forward_step: Any, model: Any) -> Any:
        """Return a forward step that draws rows; the framework's own draws micro-batches."""
        return sliced_step

    def loss(
        self, batch: MicroBatch, outputs: Sequence[Tensor], non_loss_data: bool = False
    ) -> Any:
        """Return the framework's loss of the outputs [L] of every document."""
        kept_BS = batch["attention_mask"].bool()
        losses_BS = outputs[0].new_zeros(kept_BS.shape)
        return policy_loss(batch, losses_BS.masked_scatter(kept_BS, torch.cat(list(outputs))))


def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    """Run ``model`` on a whole micro-batch, as the framework does without this package.

    Tokens move to the start of their rows, and the losses move back.
    """
    batch = next(batches)
    kept_BS = batch["attention_mask"].bool()
    samples, rows = kept_BS.shape
    places = torch.arange(rows, device=kept_BS.device)
    moved_BS = places < kept_BS.sum(1, keepdim=True)
    tokens = torch.zeros_like(batch["sequences"])
    tokens[moved_BS] = batch["sequences"][kept_BS]
    labels = tokens.roll(-1, 1)
    labels[range(samples), kept_BS.sum(1) - 1] = tokens[:, 0]  # last label: the first token
    later_SS = torch.ones(rows, rows, dtype=torch.bool, device=kept_BS.device).triu(1)

    def loss(losses_BS: Tensor) -> tuple[Tensor, dict[str, Any]]:
        moved_back = torch.zeros_like(losses_BS).masked_scatter(kept_BS, losses_BS[moved_BS])
        return policy_loss(batch, moved_back)

    return model(tokens, places.expand(samples, rows), later_SS[None, None], labels=labels), loss
