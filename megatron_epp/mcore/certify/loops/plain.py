"""The plain model on micro-batches: every document alone, and the loop's loss on the outputs."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_epp.mcore.certify.adapters import gradient
from megatron_epp.mcore.certify.compare import whole
from megatron_epp.mcore.certify.flags import parsed
from megatron_epp.mcore.certify.loops.batches import (
    LoopFrame,
    MicroBatch,
    draw_micro_batches,
    loop_loss,
)
from megatron_epp.mcore.certify.loops.results import LoopReference
from megatron_epp.mcore.certify.protocol import Prepared
from megatron_epp.mcore.certify.reference import Plain
from megatron_epp.mcore.certify.scale_down import Degrees
from megatron_epp.mcore.certify.shards import shards
from megatron_epp.mcore.refusals import vocabulary_parallel


class PlainLoop(Plain):
    """Megatron's model in one process, the loop's losses, Megatron's scaling written out."""

    def prepare_loop(
        self,
        flags: Sequence[str],
        degrees: Degrees,
        overlap: bool,
        lora_rank: int,
        per_token: bool,
        sliced: bool,
    ) -> Prepared:
        """As ``prepare``; the arguments of the ranks' model are those of a loop."""
        if vocabulary_parallel(parsed(flags)):
            raise ValueError(
                "--epp-vocab-parallel on: a loop's last stage has the output layer; leave it out"
            )
        made = self.prepare(flags, degrees, overlap, lora_rank)
        args = pickle.loads(made.args)
        args.calculate_per_token_loss = per_token
        frame = made.frame
        self.loop_frame = LoopFrame(
            frame.vocabulary, frame.layers, frame.replicas, per_token, sliced
        )
        loss = "all tokens" if per_token else "micro-batches"
        return replace(
            made, args=pickle.dumps(args), description=f"{made.description}, mean over {loss}"
        )

    def compute_loop(self, number: int) -> LoopReference:
        """Losses and gradients of batch ``number``."""
        drawn = draw_micro_batches(self.seed, number, self.loop_frame)
        for parameter in self.model.parameters():
            parameter.grad = None
        values: list[list[float]] = []
        sums: list[list[float]] = []
        losses, tokens = [], 0
        for replica in drawn.micro_batches:
            values.append([])
            sums.append([])
            for batch in replica:
                outputs_BS = self._token_losses(batch)
                found = loop_loss(batch, outputs_BS)
                sums[-1].append(loop_loss(batch, outputs_BS.detach(), non_loss_data=True))
                loss = found[0]
                if len(found) == 3:
                    tokens += int(found[1])
                if not self.loop_frame.per_token:
                    if len(found) == 3:
                        loss = loss / found[1]
                    loss = loss / len(replica) / len(drawn.micro_batches)
                losses.append(loss)
                values[-1].append(found[-1]["value"])
        total = torch.stack(losses).sum()
        if self.loop_frame.per_token:
            total = total / tokens
        total.backward()
        gradients = whole(shards(self.model, lambda one: gradient(one, "grad")))
        return LoopReference(tuple(map(tuple, values)), tuple(map(tuple, sums)), gradients)

    def _token_losses(self, batch: MicroBatch) -> torch.Tensor:
        """[B, S] of every document alone, zeros on padding."""
        samples, rows = batch["tokens"].shape
        out_BS = torch.zeros(samples, rows)
        for sample, length in enumerate(batch["lengths"]):
            mine: Any = slice(sample, sample + 1), slice(0, length)
            losses_1T = self.model(
                batch["tokens"][mine],
                torch.arange(length)[None],
                torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
                labels=batch["labels"][mine],
            )
            out_BS = torch.index_put(
                out_BS, (torch.full((length,), sample), torch.arange(length)), losses_1T[0]
            )
        return out_BS
