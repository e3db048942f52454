"""One call of Megatron's schedule function, planned and executed by this package."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megatron_epp.ir import Plan, lower_rank
from megatron_epp.mcore.data.row_shard import RowShard, row_block
from megatron_epp.mcore.kinds.registry import require_shared
from megatron_epp.mcore.loops.attached import attached
from megatron_epp.mcore.loops.call_arguments import LoopCall, process_groups
from megatron_epp.mcore.loops.failure_guard import FailureGuard
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.pipelines import ModelPipeline
from megatron_epp.mcore.loops.replica.rank_status import (
    LoopFailed,
    RankStatus,
    error_text,
    gather_statuses,
    raise_remote_failure,
)
from megatron_epp.mcore.loops.replica.read_batches import read_documents
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import reserve_exchange
from megatron_epp.planner.calls.call_cost import features
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.memory_meter import Meter, NoMeter


@dataclass(frozen=True, slots=True)
class CallWork:
    """Plan of a call, with the functions that this rank needs to execute the plan.

    Attributes:
        plan: Plan of the replica.
        make_stage: Function () -> this rank's stage for the executor.
        shape: Function (chunk) -> shape of the chunk's message.
        sizes_3C: Features of all chunks (call_cost.features), to which op times are fitted.
    """

    plan: Plan
    make_stage: Callable[[], SliceStage]
    shape: Callable[[int], tuple[int, ...]]
    sizes_3C: np.ndarray


class PlannedCall:
    """One call of the schedule function by an external training loop, executed by a plan.

    ``count()`` returns the number of this call.
    """

    def __init__(
        self, settings: Settings, call: LoopCall, pipeline: ModelPipeline, count: Callable[[], int]
    ):
        self.settings, self.call, self.pipeline, self._count = settings, call, pipeline, count
        self.batches = MicroBatches(call.one_iterator, call.num_microbatches)

    def result(self) -> list[Any]:
        """Run the call and return Megatron's forward_data_store.

        In training, gradients are finalised. Raises LoopRefusal, LoopFailed, or the loop's errors.
        """
        call, pipeline, config = self.call, self.pipeline, self.call.config
        try:
            groups = process_groups(call)
        except Exception as error:  # the other ranks wait for this rank's status
            gather_statuses(RankStatus(error=error_text(error)), pipeline.control)
            raise
        stage = self.run(self._work(groups))
        if config.finalize_model_grads_func is not None and not call.forward_only:
            total = torch.zeros([], dtype=torch.int, device=this_device())
            config.finalize_model_grads_func(
                [call.one_model],
                stage.tokens + total if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=call.force_all_reduce,
            )
        self._stop_timer()
        return stage.in_callers_order()

    def _stop_timer(self) -> None:
        if self.call.config.timers is not None:
            self.call.config.timers("forward-backward").stop()

    # -------------------------------------------------------------- before the ops

    def _work(self, groups: Any) -> CallWork:
        """Read the documents of the call, and return its plan and what executes it."""
        call, pipeline, batches = self.call, self.pipeline, self.batches
        model = attached(call.one_model)
        assert model is not None, "the schedule plans calls of attached models only"
        forests = read_documents(call, pipeline, batches, model)
        lengths = [tuple(node.tokens for node in forest.nodes) for forest in forests]
        parents = []
        if any(forest.shares for forest in forests):
            require_shared(call.config, "the adapter's prefixes")
            if model.has_front:
                raise ValueError(
                    "the adapter's prefixes: what stands in front of the layers sees documents "
                    "whole, so what they share cannot be computed once; leave prefixes out"
                )
            parents = [tuple(node.parent for node in forest.nodes) for forest in forests]
        trees = [parents] if parents else []
        make, layers, rates = self.settings.make_plan, pipeline.layers, pipeline.rates_SK3
        options = pipeline.options(call, self.settings.options, [sum(of) for of in lengths])
        options = replace(options, cut=model.slicing, memory=model.memory)
        key = (tuple(lengths), tuple(parents), call.forward_only, options, rates.tobytes())
        plan = pipeline.plan(
            key, lambda: make(lengths, layers, rates, options, call.forward_only, *trees)
        )
        config = call.config
        splits = groups.tp.size() if config.sequence_parallel else 1
        row_shard = RowShard(groups.cp.size(), groups.cp.rank(), splits, row_block(config))

        def make_stage() -> SliceStage:
            stage = self.settings.make_stage(
                call, batches, plan, pipeline.rank, groups, model, forests, row_shard
            )
            reserve_exchange(stage, (plan,), row_shard)
            return stage

        def shape(chunk: int) -> tuple[int, ...]:
            return row_shard.message(row_shard.rows(plan.chunks[chunk])), 1, config.hidden_size

        chunks = range(len(plan.chunks))
        sizes = features([c.tokens for c in plan.chunks], [plan.pairs(c) for c in chunks])
        return CallWork(plan, make_stage, shape, sizes)

    # -------------------------------------------------------------- the ops, and after them

    def run(self, work: CallWork) -> SliceStage:
        """Execute this rank's ops; return its stage. Collective; all ranks raise if one fails."""
        call, pipeline, config = self.call, self.pipeline, self.call.config
        programs, number = pipeline.programs, pipeline.rank
        programs.current_op.iteration = self._count()
        dtype = config.pipeline_dtype or getattr(config, "params_dtype", torch.float32)
        program = lower_rank(work.plan, number)
        links = programs.links(lambda message: work.shape(message.chunk), dtype)
        meter: Meter = NoMeter()
        stage: SliceStage | None = None
        begun: SliceStage | Exception
        try:
            meter = self.settings.make_meter(call.one_model)
            begun = stage = work.make_stage()
        except Exception as error:  # other ranks may have begun and wait for messages
            begun = error
        store = Store({}) if stage is None else stage.store
        guard = FailureGuard(
            begun,
            store,
            lambda chunk: torch.zeros(work.shape(chunk), dtype=dtype, device=programs.device),
            first=number == 0,
            last=number == pipeline.stages - 1,
        )
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        with ExitStack() as stack:
            if stage is not None:
                stack.enter_context(stage)
            stores = StageStores([store])
            records, failure = programs.run(program, {number: guard}, stores, links, meter)
        raised: Exception | None = guard.error
        went_well = raised is None and failure is None
        if went_well and not call.forward_only and programs.groups is not None:
            pipeline.seconds.saw(work.sizes_3C, tuple(records))
        refusal = str(raised) if isinstance(raised, ValueError) else None
        if failure is not None:
            raised = MemoryError(
                f"{failure.op} of stage {failure.stage} on pipeline rank {failure.rank}: out of "
                f"memory ({failure.reason})"
            )
        self._exchange(raised, refusal)
        self.batches.finish()
        if self.settings.observe is not None:
            self.settings.observe(CallRecord(work.plan, records, meter.peak_bytes))
        assert stage is not None, "its construction raised nothing"
        return stage

    def _exchange(self, error: Exception | None, refusal: str | None) -> None:
        """Exchange success or failure with all ranks of the replica; raise if any rank failed.

        ``refusal`` is the message of an error in the loop's input.
        """
        pipeline = self.pipeline
        pipeline.current_op.enter("what became of the call on all ranks of the replica")
        text = None if error is None else error_text(error)
        value = (pipeline.rank, pipeline.seconds.rates)
        statuses = gather_statuses(RankStatus(value, refusal, text), pipeline.control)
        # This stage's error may follow from wrong rows of an earlier stage, which is then raised.
        misled = any(status.refusal and status.value[0] < pipeline.rank for status in statuses)
        if error is not None and refusal is None and not misled:
            raise error
        try:
            raise_remote_failure(statuses, pipeline.control)
        except (ValueError, LoopFailed) as heard:
            raise heard from error
        # All ranks use the rates of each stage's first rank, so that their rates are equal.
        pipeline.learn({status.value[0]: status.value[1] for status in reversed(statuses)})
