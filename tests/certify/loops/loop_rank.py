"""Rank of a training loop under test: it builds a model and calls the package's schedule."""

from collections.abc import Sequence
from itertools import accumulate
from random import Random
from typing import Any, ClassVar, override

import numpy
import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_epp.certify.batches import modes_drawn
from megatron_epp.certify.protocol import ModelSetup
from megatron_epp.ir import OFFLOAD, Kind, Plan
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.certify.models import elastic_models
from megatron_epp.mcore.loops.adapters.packed import PackedDocuments
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.attached import attach_to
from megatron_epp.mcore.loops.install import Installation, installed
from megatron_epp.mcore.loops.replica_groups import CONTROL
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.planner.calls.call_cost import CallDocuments
from megatron_epp.planner.calls.call_options import CallOptions
from tests.certify.allowed_collectives import SCHEDULE, AllowedCollective
from tests.certify.loops.loop_results import LoopResult
from tests.certify.loops.micro_batches import (
    MicroBatch,
    arbitrary_sliced_plans,
    loop_forward_step,
    loop_loss,
)
from tests.certify.loops.other_models import AROUND, PixelSamples
from tests.certify.rank import WatchedRank

# Collectives over a replica that a call of a loop may issue.
_LOOP_COLLECTIVES = (
    AllowedCollective(
        "call",
        CONTROL,
        r"megatron_epp\.runtime\.consensus\.all_gathered",
        "what every rank of the replica has read, the plan that one of them made, and whether all "
        "have a stage, before the ops; what became of the call, after them",
    ),
    AllowedCollective(
        "tokens of a micro-batch per expert",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        r"megatron\.core\.tensor_parallel\.mappings\._reduce",
        "for auxiliary losses, once per layer run, where ranks share its rows",
    ),
    AllowedCollective(
        "outputs of a slice",
        "CONTEXT_PARALLEL_GROUP",
        r"megatron_epp\.mcore\.loops\.slice_stage\._of_all_(ranks|parts)",
        "each rank computes some of its rows; the loop's loss sees whole documents, on every rank, "
        "where it may be of a part of them",
    ),
)
_NOT_SCHEDULED = ("plan text", "plan digest", "report", "records", "memory limit")
LOOP = (*_LOOP_COLLECTIVES, *(entry for entry in SCHEDULE if entry.name not in _NOT_SCHEDULED))


class LoopRank(WatchedRank):
    """Rank that runs a training loop with Megatron's ``get_forward_backward_func``."""

    LISTED: ClassVar = LOOP
    RESULT: ClassVar = LoopResult

    @override
    def prepare(self, prepared: ModelSetup) -> None:
        if (before := installed()) is not None:
            before.remove()
        super().prepare(prepared)

    @override
    def build(self) -> list[Any]:
        self.ran: list[CallRecord] = []
        kind, frame = self.trial.loop_model, self.frame

        def wrap(description: Any) -> None:
            if kind is not None:
                description.pre_wrap_hooks.append(
                    lambda models: [AROUND[kind](one) for one in models]
                )

        models = elastic_models(self.args, wrap, self.trial.lora_rank)
        get_model_config(models[0]).variable_seq_lengths = True
        Installation(Settings(make_plans=self._plans, observe=self.ran.append))
        adapter = PixelSamples(loop_loss) if frame.pixels else Samples(loop_loss)
        if self.trial.packed:
            adapter = PackedDocuments(_loss_of_packed)
        attach_to(models[0], adapter, share_from=int(frame.model.trees and not frame.pixels))
        self.models = models
        return models

    @override
    def results(self, trained: Any, evaluated: Any) -> tuple[Any, ...]:
        plan, values = self.ran[-1].plan, tuple(item["value"] for item in trained)
        halved = sum(op.kind is Kind.WEIGHT for order in plan.orders for op in order)
        replica = mpu.get_data_parallel_rank()
        branches = sum(prefix is not None for prefix in plan.prefixes)
        counts = len(plan.chunks), halved, branches
        return replica, values, tuple(evaluated), *counts, *self.traffic_counts()

    def run(self, drawn: Any, forward_only: bool) -> Any:
        """Call the schedule with the drawn micro-batches, and return its forward_data_store."""
        batches = [*map(_on_device, drawn.micro_batches[mpu.get_data_parallel_rank()])]
        if self.trial.packed:
            batches = [*map(_packed, batches)]
        for model in self.models:
            model.train(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=loop_forward_step,
                data_iterator=iter(batches),
                model=self.models,
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _plans(
        self,
        calls: Sequence[CallDocuments],
        layers: Sequence[int],
        rates: numpy.ndarray,
        freedom: CallOptions,
        forward_only: bool,
    ) -> tuple[Plan, ...]:
        modes = modes_drawn(EXECUTABLE.replace(OFFLOAD, ""))
        block = mpu.get_data_parallel_rank() // len(calls)
        random = Random(f"{self.seed} {self.number // self.frame.turns} {block} {forward_only}")
        return arbitrary_sliced_plans(calls, layers, random, freedom.split, forward_only, modes)


def _packed(batch: MicroBatch) -> MicroBatch:
    """Return the samples of ``batch`` as documents of one row, and ``batch`` for the loss."""
    lengths = batch["lengths"]
    rows = {
        name: torch.cat([row[:n] for row, n in zip(batch[name], lengths, strict=True)])[None]
        for name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    return rows | {"cu_seqlens": torch.tensor([0, *accumulate(lengths)]), "padded": batch}


def _loss_of_packed(batch: MicroBatch, losses_1T: torch.Tensor, **how: bool) -> Any:
    """Return the loss of the samples, whose losses are padded again."""
    padded = batch["padded"]
    parts = losses_1T[0].split(padded["lengths"])
    return loop_loss(padded, Samples().laid_out(padded, parts), **how)


def _on_device(batch: MicroBatch) -> MicroBatch:
    device = this_device()
    return {
        name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()
    }
