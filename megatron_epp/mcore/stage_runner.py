"""Runs this rank's part of a step: puts data, store, links, model and executor together."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_epp.ir import Plan, Step, Timed, lower_rank, slices_of
from megatron_epp.layers.chunk_state import store_for
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder
from megatron_epp.mcore.data.global_batches import Batch, DocumentSource
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.model.split_backward import early_modules, refuse_split
from megatron_epp.mcore.model.stage import ForwardStep, ModelStage, sum_reports
from megatron_epp.mcore.model.vocabulary.head import head_for
from megatron_epp.mcore.model.vocabulary.messages import MessageShapes
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.executor import CurrentOp, Executor, Failure
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.instruments import instruments_for
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter


@dataclass(frozen=True, slots=True)
class StageRun:
    """Results of a stage for its part of a step.

    reports   on the last stage one, each entry summed over this replica's tokens; else none
    tokens    that carry a loss
    failure   the op that ran out of memory, if one did: then nothing else counts
    """

    plan: Plan
    records: tuple[Timed, ...]
    reports: list[dict[str, Tensor]]
    tokens: Tensor | int
    failure: Failure | None


@dataclass
class StageRunner:
    """Runner of the steps of a job on this rank.

    make_stage   the model's side of the executor (model/stage.py)
    host_bytes   that offloaded layers may take of the host's memory
    host_peak_bytes   that those of the latest step took
    """

    groups: Groups
    share: RowShare
    meter: Meter
    current_op: CurrentOp
    device: torch.device
    early_head: bool
    keeps_last: bool
    make_stage: Callable[..., ModelStage] = ModelStage
    host_bytes: float = math.inf
    clock: HostClock | CudaClock = field(init=False)
    heap: HostHeap | None = field(init=False)
    host_peak_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.clock, self.heap = instruments_for(self.device)

    def run(
        self,
        step: Step,
        batch: Batch,
        documents: DocumentSource,
        model: Any,
        config: Any,
        forward_step: ForwardStep,
    ) -> StageRun:
        """Run this replica's plan on its documents of ``batch``."""
        stage, replica = self.groups.stage, self.groups.replica
        plan, samples = step.plans[replica], batch.samples[list(step.deals[replica])]
        if any(other.splits_backward for other in step.plans):
            is_last = stage == self.groups.stages - 1
            refuse_split(model, early_modules(model, self.early_head and is_last))
        slices = slices_of(plan)
        program = lower_rank(plan, stage, step.block(replica))
        store = store_for(plan, slices, self.keeps_last)
        builder = ChunkBatchBuilder(
            plan, slices, samples, documents, stage, self.share, self.device
        )
        self.clock.start()
        host = HostStore(self.device, self.meter, model.parameters(), self.host_bytes)
        dtype = config.pipeline_dtype or config.params_dtype
        shapes = MessageShapes(
            plan, lambda chunk: self.share.message(builder.rows(chunk)), config.hidden_size, dtype
        )
        head = head_for(model, plan, stage, shapes, self.meter)
        links = Links(self.groups.payload, shapes, dtype, self.device, self.groups.pipeline_ranks)
        with self.make_stage(
            model, config, forward_step, builder, plan, store, self.early_head, host, head
        ) as compute:
            executor = Executor(
                program,
                compute,
                links,
                store,
                self.clock,
                self.meter,
                self.current_op,
                self.groups.peers,
                self.heap,
            )
            records = executor.run()
        self.host_peak_bytes = host.peak_bytes
        return StageRun(
            plan, records, sum_reports(compute.reports), compute.tokens, executor.failure
        )

    def flop_borders(self, plan: Plan) -> Tensor:
        """Where the whole documents of ``plan`` begin and end: [documents + 1] int64."""
        borders = numpy.concatenate(([0], numpy.cumsum(plan.documents)))
        return torch.from_numpy(borders).to(self.device)
