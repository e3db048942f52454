"""Runs a stage's part of a step: puts plan, data, store and model together."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_epp.ir import Plan, Step, Timed, lower_rank, slices_of
from megatron_epp.layers.chunk_state import store_for
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder
from megatron_epp.mcore.data.further_tokens import Predictions
from megatron_epp.mcore.data.global_batches import Batch, TokenSource
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.model.quantisation import forget_quantised_weights
from megatron_epp.mcore.model.split_backward import early_modules, refuse_split
from megatron_epp.mcore.model.stage import ForwardStep, ModelStage, sum_reports
from megatron_epp.mcore.model.vocabulary.head import head_for
from megatron_epp.mcore.model.vocabulary.messages import MessageShapes
from megatron_epp.runtime.executor import Failure
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.memory_meter import Meter
from megatron_epp.runtime.program_runner import ProgramRunner


@dataclass(frozen=True, slots=True)
class StageRun:
    """Results of a stage for its part of a step.

    reports   on the last stage one, each entry summed over this replica's tokens; else none
    tokens    that carry a loss
    failure   the op that ran out of memory, if one did: then nothing else counts
    host_peak_bytes   that offloaded layers took of the host's memory
    """

    plan: Plan
    records: tuple[Timed, ...]
    reports: list[dict[str, Tensor]]
    tokens: Tensor | int
    failure: Failure | None
    host_peak_bytes: int


@dataclass(frozen=True, slots=True)
class StageRunner:
    """Runner of a stage's part of steps.

    make_stage   the model's side of the executor (model/stage.py)
    host_bytes   that offloaded layers may take of the host's memory
    """

    programs: ProgramRunner
    stage: int
    replica: int
    share: RowShare
    meter: Meter
    early_head: bool
    stores_last_slice: bool
    make_stage: Callable[..., ModelStage] = ModelStage
    host_bytes: float = math.inf

    def run(
        self,
        step: Step,
        batch: Batch,
        documents: TokenSource,
        model: Any,
        config: Any,
        forward_step: ForwardStep,
    ) -> StageRun:
        """Run this replica's plan on its documents of ``batch``."""
        forget_quantised_weights(model)
        stage, replica, device = self.stage, self.replica, self.programs.device
        plan, samples = step.plans[replica], batch.samples[list(step.deals[replica])]
        if any(other.splits_backward for other in step.plans):
            refuse_split(model, early_modules(model, self.early_head and stage == plan.stages - 1))
        slices = slices_of(plan)
        program = lower_rank(plan, stage, step.block(replica))
        store = store_for(plan, slices, self.stores_last_slice)
        predictions = Predictions.of(config, not plan.forward_only)
        builder = ChunkBatchBuilder(
            plan, slices, samples, documents, stage, self.share, device, predictions
        )
        host = HostStore(device, self.meter, model.parameters(), self.host_bytes)
        dtype = config.pipeline_dtype or config.params_dtype
        shapes = MessageShapes(
            plan,
            lambda chunk: self.share.message(builder.rows(chunk)),
            config.hidden_size,
            dtype,
            predictions.each,
        )
        head = head_for(model, plan, stage, shapes, self.meter)
        with self.make_stage(
            model, config, forward_step, builder, plan, store, self.early_head, host, head
        ) as compute:
            links = self.programs.links(shapes, dtype)
            records, failure = self.programs.run(program, compute, store, links, self.meter)
        reports = sum_reports(compute.reports)
        return StageRun(plan, records, reports, compute.tokens, failure, host.peak_bytes)

    def flop_borders(self, plan: Plan) -> Tensor:
        """Where the whole documents of ``plan`` begin and end: [documents + 1] int64."""
        borders = numpy.concatenate(([0], numpy.cumsum(plan.documents)))
        return torch.from_numpy(borders).to(self.programs.device)
