"""Reference model for training loops: it runs every document alone and computes the loop's loss.

MoE auxiliary losses depend on the whole micro-batch. Models with such losses
therefore run the whole micro-batch at once.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, override

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_epp.certify.protocol import ModelSetup
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.certify.model_flags import parsed
from megatron_epp.mcore.certify.reference import Gradients, Sums, off, token_losses
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.moe.limits import balancing_types, has_experts
from tests.certify.loops.loop_results import LoopReference
from tests.certify.loops.micro_batches import DrawnMicroBatches, LoopFrame, MicroBatch, loop_loss
from tests.certify.loops.other_models import WithEncoder
from tests.certify.reference import CheckedReference
from tests.certify.trial import ENCODER


class ReferenceLoop(CheckedReference):
    """Megatron's model in one process, with the loop's losses and Megatron's loss scaling."""

    def prepare(self, turn: int) -> ModelSetup:
        """Build reference model number ``turn``; return the ranks' setup and loop settings."""
        degrees = self.trial.degrees
        raw = parsed(self.flags(turn), degrees.pp)
        if vocabulary_parallel(raw):
            raise ValueError(
                "--epp-vocab-parallel on: a loop's last stage has the output layer; leave it out"
            )
        if raw.fp8 and raw.transformer_impl != "local":
            raise ValueError("--fp8-format: loops are not certified in fp8; leave it out")
        setup, per_token = super().prepare(turn), bool(turn % 2)
        for model in filter(None, (self.model, self.own)):
            get_model_config(model).calculate_per_token_loss = per_token
            for module in model.modules():
                # Routers copy this setting when they are built.
                if hasattr(module, "calculate_per_token_loss"):
                    module.calculate_per_token_loss = per_token
        args = pickle.loads(setup.args)
        args.calculate_per_token_loss = per_token
        pixels = self.trial.loop_model == ENCODER
        self.frame = LoopFrame(setup.frame, per_token, pixels, self.trial.turns)
        loss = "all tokens" if per_token else "micro-batches"
        description = f"{setup.description}, mean over {loss}"
        return ModelSetup(pickle.dumps(args), self.frame, setup.weights, description)

    @override
    def built(self, args: Any, elastic: Any) -> Any:
        model = super().built(args, elastic)
        return WithEncoder(model) if self.trial.loop_model == ENCODER else model

    def compute(self, number: int) -> LoopReference:
        """Return the losses and gradients of batch ``number``."""
        drawn = self.frame.draw(self.seed, number)
        with self._exactly():
            run = self._run(self.model, drawn)
        values, sums = (tuple(map(tuple, kept)) for kept in (run.values, run.sums))
        own, units = None, []
        if self.own is None:
            for of_values, of_sums in zip(values, sums, strict=True):
                scales = (max(1e-3, *map(abs, of_values)), max(1e-3, *map(abs, of_sums)))
                units.append((scales,) * len(of_values))
        else:
            own_run = self._run(self.own, drawn)
            own = own_run.gradients
            units = [
                self._units(*each)
                for each in zip(run.outputs, own_run.outputs, drawn.micro_batches, strict=True)
            ]
        return LoopReference(run.gradients, own, frozenset(), values, sums, tuple(units))

    def _run(self, model: Any, drawn: DrawnMicroBatches) -> "LoopRun":
        run, sums = LoopRun(), Sums(model)
        losses: list[tuple[Tensor, float]] = []  # each with its weight in the total
        tokens = 0
        for replica in drawn.micro_batches:
            run.values.append([])
            run.sums.append([])
            run.outputs.append([])
            for batch in replica:
                outputs_BS = _losses(model, batch)
                result = loop_loss(batch, outputs_BS)
                run.sums[-1].append(loop_loss(batch, outputs_BS.detach(), non_loss_data=True))
                loss = result[0]
                if len(result) == 3:
                    tokens += int(result[1])
                    if not self.frame.per_token:
                        mask_BS = batch["loss_mask"].to(outputs_BS.dtype)
                        loss = (outputs_BS * mask_BS).sum() / mask_BS.sum().clamp(min=1)
                losses.append((loss, 1 / len(replica) / len(drawn.micro_batches)))
                run.values[-1].append(result[-1]["value"])
                run.outputs[-1].append(outputs_BS.detach())
        for loss, of_replica in losses:
            loss_weight = 1 / tokens if self.frame.per_token else of_replica
            for kind in LAYER_CERTIFICATES:
                kind.weigh_losses(torch.tensor(loss_weight))
            sums.backward(loss * loss_weight)
        run.gradients = self.gradients(model, sums)
        return run

    def _units(
        self, exact: Sequence[Tensor], own: Sequence[Tensor], batches: Sequence[MicroBatch]
    ) -> tuple[tuple[float, float], ...]:
        """Return upper bounds of the rounding errors of losses, one pair per micro-batch.

        A pair is (bound for the loss value, bound for the loss sum) if all tokens' errors add up.
        ``own`` are token losses in the certified dtype; ``exact`` are these losses in float64.
        """
        units = []
        for expected_BS, result_BS, batch in zip(exact, own, batches, strict=True):
            error = off([result_BS], [expected_BS])
            leaf_BS = expected_BS.clone().requires_grad_()
            loss_sum = (leaf_BS * batch["loss_mask"].to(leaf_BS.dtype)).sum()
            slopes = (
                torch.autograd.grad(output, leaf_BS)[0].norm()
                for output in (loop_loss(batch, leaf_BS)[0], loss_sum)
            )
            of_value, of_sum = (error * float(slope) for slope in slopes)
            units.append((of_value, of_sum))
        return tuple(units)


@dataclass
class LoopRun:
    """Results of one model: token losses [B, S] per micro-batch, and fields of LoopReference."""

    values: list[list[float]] = field(default_factory=list)
    sums: list[list[float]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)


def _losses(model: Any, batch: MicroBatch) -> Tensor:
    """Return the token losses [B, S] of every document alone, with zeros on padding.

    If the model adds auxiliary losses, run the whole micro-batch instead. These losses leave out
    the padding, which slices do not compute.
    """
    config = get_model_config(model)
    samples, rows = batch["tokens"].shape
    if has_experts(config) and (config.moe_z_loss_coeff or {*balancing_types(config)} - {"none"}):
        places, mask = batch["position_ids"], batch["attention_mask"]
        padding_BS = places >= torch.tensor(batch["lengths"])[:, None]
        full_BS: Tensor = model(
            batch["tokens"],
            places,
            mask,
            labels=batch["labels"],
            padding_mask=padding_BS,
            **{name: batch[name] for name in ("pixels",) if name in batch},
        )
        return full_BS
    out_BS = torch.zeros(samples, rows)
    for sample, length in enumerate(batch["lengths"]):
        sample_rows: Any = slice(sample, sample + 1), slice(0, length)
        besides = {"pixels": batch["pixels"][sample_rows]} if "pixels" in batch else {}
        losses_T = token_losses(
            model, batch["tokens"][sample_rows], batch["labels"][sample_rows], **besides
        )
        where = torch.full((length,), sample), torch.arange(length)
        out_BS = torch.index_put(out_BS, where, losses_T)
    return out_BS
