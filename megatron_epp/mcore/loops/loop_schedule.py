"""The schedule that loops of others call: Megatron's contract, run as a plan.

One object stands in for all of Megatron's schedules. What it keeps between
calls is what it has learnt: process groups of this replica, seconds of ops, plans.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.autoload import NO_PIPELINE, PIPELINE, first_line
from megatron_epp.ir import Plan, lower_rank
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.loops.attached import AttachedModel, attached
from megatron_epp.mcore.loops.call_arguments import LoopCall, fixed_shape, not_ours, process_groups
from megatron_epp.mcore.loops.failure_guard import FailureGuard
from megatron_epp.mcore.loops.framework_readers import FrameworkReader, ShapeWitness, reader_of
from megatron_epp.mcore.loops.micro_batch_stage import MicroBatchStage
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.pipelines import ModelPipeline, Pipelines
from megatron_epp.mcore.loops.read_batches import read_documents, read_shapes
from megatron_epp.mcore.loops.replica.rank_status import (
    LoopFailed,
    LoopRefusal,
    RankStatus,
    error_text,
    gather_statuses,
    raise_what_others_met,
)
from megatron_epp.mcore.loops.replica.replica_plans import counted
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.kinds.registry import require_shared
from megatron_epp.mcore.model.stage import reduce_in_turn
from megatron_epp.mcore.placing.part_config import config_of_part
from megatron_epp.planner.calls.call_cost import features
from megatron_epp.planner.calls.call_options import AS_GIVEN, CallOptions
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.runtime.executor import OutsidePhase
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.memory_meter import Meter, NoMeter

logger = logging.getLogger(__name__)


LoopStage = MicroBatchStage | SliceStage


@dataclass(frozen=True, slots=True)
class _CallRun:
    """A call on this rank. make_stage: what computes its part of that number; shape: of a chunk's
    message; sizes_3C: features of all chunks."""

    plan: Plan
    make_stage: Callable[[int], LoopStage]
    shape: Callable[[int], tuple[int, ...]]
    sizes_3C: np.ndarray


@dataclass(frozen=True, slots=True)
class WholeShapes:
    """``shapes`` of a call's micro-batches; fixed: of all messages, where they are alike; parts:
    ranks of a stage that share a micro-batch's rows."""

    shapes: Sequence[MicrobatchShape]
    fixed: tuple[int, ...] | None
    parts: int
    hidden: int

    def message(self, chunk: int) -> tuple[int, ...]:
        """The shape of what this rank sends of a chunk."""
        shape = self.shapes[chunk]
        return self.fixed or (shape.rows // self.parts, shape.samples, self.hidden)


class LoopSchedule:
    """stock: Megatron's schedules, by the pipelines of ``autoload.TARGETS``."""

    def __init__(self, settings: Settings, stock: dict[str, Callable[..., Any]]):
        self.settings, self.stock = settings, stock
        self._pipelines = Pipelines(settings)
        self._said: set[str] = set()
        self._calls = 0
        self._gave_up = False  # on what failed before a call's first op
        self._committed = False  # from here on the call's errors are the loop's

    # -------------------------------------------------------------- a call

    def __call__(self, kind: str, keywords: dict[str, Any]) -> list[Any]:
        """The call's result: by a plan, or by Megatron's own schedule where the call is not ours.

        So, too, where something fails before the first op, which nobody could foresee: a loop that
        ran before runs on. Errors of the forward step, of ``lengths``, of slices are raised.
        """
        if self._gave_up:
            return self.stock[kind](**keywords)
        batches: list[MicroBatches] = []
        self._committed = False
        try:
            call = LoopCall.of(keywords)
            pipeline = self._ours(call, kind)
            if isinstance(pipeline, ModelPipeline):
                batches = [MicroBatches(each, call.num_microbatches) for each in call.iterators]
                try:
                    found = self._by_plan(call, pipeline, batches, keywords)
                finally:
                    between = OutsidePhase("what the loop does between two calls")
                    pipeline.current_op.enter(between)
                if found is not None:
                    return found
                untold = "micro-batches of several lengths that nobody tells"
                reason = f"calls with {pipeline.unlike or untold} (install_schedule(lengths=))"
            else:
                reason = f"calls with {pipeline}"
        except LoopRefusal:
            raise
        except Exception as error:
            if self._committed:
                raise
            self._gave_up = True
            reason = (
                f"all calls from here on, as a plan failed before it began: {first_line(error)}"
            )
        if any(each.drawn for each in batches):
            again = [each.from_the_start() for each in batches]
            keywords = {**keywords, "data_iterator": again if len(again) > 1 else again[0]}
        return self._leave(reason, kind, keywords)

    def _leave(self, reason: str, kind: str, keywords: dict[str, Any]) -> list[Any]:
        """Megatron's own schedule runs the call; said once for every reason, by one rank."""
        if reason not in self._said:
            self._said.add(reason)
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning("Megatron's own schedule runs %s", reason)
        return self.stock[kind](**keywords)

    def _ours(self, call: LoopCall, kind: str) -> ModelPipeline | str:
        """The pipeline that runs the call, or why it is Megatron's to run, in a few words."""
        pipelined = kind != NO_PIPELINE
        if pipelined and not mpu.model_parallel_is_initialized():
            return "pipelines without Megatron's global groups"
        ranks = mpu.get_pipeline_model_parallel_world_size() if pipelined else 1
        reason = not_ours(call, ranks)
        if reason is None and pipelined and call.pg_collection is not None:
            reason = _other_pipeline(call.pg_collection)
        if reason is not None:
            return reason
        try:
            return self._pipelines.of(call, ranks)
        except ValueError as refusal:  # such a world that our messages would stand still in it
            return str(refusal)

    def _by_plan(
        self,
        call: LoopCall,
        pipeline: ModelPipeline,
        batches: Sequence[MicroBatches],
        keywords: dict[str, Any],
    ) -> list[Any] | None:
        """The result of the call, whose parts draw from ``batches``; None where it cannot be
        planned."""
        sliced = attached(call.one_model)
        # Who attaches a model asks for slices, or for a budget, and is told what cannot be had.
        self._committed = sliced is not None
        slices = sliced is not None and sliced.slicing
        try:
            groups, config = process_groups(call), call.config
            told = pipeline.stages > 1 and not slices
            fixed = fixed_shape(call, groups) if told else None
            reader = self.settings.lengths
            unknown = fixed is None and pipeline.unlike is None and not pipeline.interleaved
            if told and reader is None and unknown:
                reader = reader_of(call, groups)
        except Exception as error:  # the others wait for what this rank reads
            gather_statuses(RankStatus(error=error_text(error)), pipeline.control)
            raise
        if sliced is not None and slices:
            work = self._sliced(call, pipeline, batches[0], groups, sliced)
        else:
            shapes = read_shapes(call, pipeline, batches[0], fixed, reader)
            if shapes is None:
                return None
            varies = pipeline.stages > 1 and fixed is None
            hidden = config.hidden_size if varies else 0  # else the configuration may have none
            whole = WholeShapes(shapes, fixed, _ranks_of_rows(config, groups), hidden)
            if isinstance(reader, FrameworkReader) and not pipeline.shown:
                return self._show(pipeline, batches[0], whole, reader, keywords)
            work = self._whole(call, pipeline, batches, groups, sliced, whole)
        stages = self._run(call, pipeline, batches, work)
        if config.finalize_model_grads_func is not None and not call.forward_only:
            total = torch.zeros([], dtype=torch.int, device=this_device())
            config.finalize_model_grads_func(
                call.models,
                sum((each.tokens for each in stages), total)
                if config.calculate_per_token_loss
                else None,
                pg_collection=groups,
                force_all_reduce=call.force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return stages[-1].in_callers_order()

    # -------------------------------------------------------------- before the ops

    def _whole(
        self,
        call: LoopCall,
        pipeline: ModelPipeline,
        batches: Sequence[MicroBatches],
        groups: Any,
        model: AttachedModel | None,
        whole: WholeShapes,
    ) -> _CallRun:
        """Every micro-batch a chunk."""
        extents = whole.shapes
        make, layers, rates = self.settings.make_plan, pipeline.layers, pipeline.rates_SK3
        # What was never measured, or long ago, may be wrong about which order is better.
        wanted = self.settings.options
        tells = not call.forward_only and (model is None or model.memory is None)
        if not pipeline.measured or (tells and pipeline.track_record.due):
            wanted = CallOptions(False, False)
        options = pipeline.options(call, wanted, [extent.tokens for extent in extents])
        if model is not None:
            options = replace(options, memory=model.memory)
        key = (tuple(extents), call.forward_only, options, rates.tobytes())
        ranks = [pipeline.ranks] if pipeline.interleaved else []
        plan = pipeline.plan(
            key, lambda: make(extents, layers, rates, options, call.forward_only, *ranks)
        )

        def make_stage(part: int) -> LoopStage:
            stage, cp = pipeline.own_stages[part], groups.cp.size()
            own = [part, config_of_part(call.config, part)] if pipeline.interleaved else []
            return self.settings.make_stage(
                call.of_part(part), batches[part], plan, stage, cp, whole.message, *own
            )

        sizes = features([e.tokens for e in extents], [e.pairs for e in extents])
        return _CallRun(plan, make_stage, whole.message, sizes)

    def _show(
        self,
        pipeline: ModelPipeline,
        batches: MicroBatches,
        whole: WholeShapes,
        reader: FrameworkReader,
        keywords: dict[str, Any],
    ) -> list[Any]:
        """Megatron's own schedule runs the call, and shows whether ``whole`` is what comes."""
        pipeline.current_op.enter(OutsidePhase("the first call, which Megatron's schedule runs"))
        witness = ShapeWitness(keywords["forward_step_func"])
        shown = {"forward_step_func": witness, "data_iterator": batches.from_the_start()}
        self._committed = True
        made = self.stock[PIPELINE](**{**keywords, **shown})
        last = pipeline.rank == pipeline.stages - 1
        expected = [whole.message(number) for number in range(len(whole.shapes))]
        mine = RankStatus(None if last else witness.unlike(expected))
        every = gather_statuses(mine, pipeline.control)
        unlike = next((told.value for told in every if told.value), None)
        if unlike is not None:
            pipeline.unlike = f"micro-batches that {reader.framework} lays out otherwise: {unlike}"
        pipeline.shown = True
        return made

    def _sliced(
        self,
        call: LoopCall,
        pipeline: ModelPipeline,
        batches: MicroBatches,
        groups: Any,
        model: AttachedModel,
    ) -> _CallRun:
        """The documents of the micro-batches cut into slices."""
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
        make, layers, rates = self.settings.make_sliced_plan, pipeline.layers, pipeline.rates_SK3
        options = pipeline.options(call, self.settings.options, [sum(of) for of in lengths])
        options = replace(options, memory=model.memory)
        key = (tuple(lengths), tuple(parents), call.forward_only, options, rates.tobytes())
        plan = pipeline.plan(
            key, lambda: make(lengths, layers, rates, options, call.forward_only, *trees)
        )
        config = call.config
        splits = groups.tp.size() if config.sequence_parallel else 1
        share = RowShare(groups.cp.size(), groups.cp.rank(), splits)

        def make_stage(part: int) -> LoopStage:
            return SliceStage(call, batches, plan, pipeline.rank, groups, model, forests, share)

        def shape(chunk: int) -> tuple[int, ...]:
            return share.message(share.rows(plan.chunks[chunk])), 1, config.hidden_size

        chunks = range(len(plan.chunks))
        sizes = features([c.tokens for c in plan.chunks], [plan.pairs(c) for c in chunks])
        return _CallRun(plan, make_stage, shape, sizes)

    # -------------------------------------------------------------- the ops, and behind them

    def _run(
        self,
        call: LoopCall,
        pipeline: ModelPipeline,
        batches: Sequence[MicroBatches],
        work: _CallRun,
    ) -> list[LoopStage]:
        """The stages, which have computed the call. Raises where a rank failed, on all of them."""
        config, programs = call.config, pipeline.programs
        self._calls += 1
        programs.current_op.iteration = self._calls
        dtype = config.pipeline_dtype or getattr(config, "params_dtype", torch.float32)
        # Replicas that meet in their ops do not wait for each other's messages besides.
        block = (counted(work.plan),) if pipeline.in_lockstep else ()
        program = lower_rank(work.plan, pipeline.rank, block)
        links = programs.links(lambda message: work.shape(message.chunk), dtype)
        meter: Meter = NoMeter()
        stages: list[LoopStage] = []
        failed: Exception | None = None
        try:
            meter = self.settings.make_meter(call.one_model)
            for part in range(len(pipeline.own_stages)):
                stages.append(work.make_stage(part))
        except Exception as error:  # the others may have begun, and wait for messages
            stages, failed = [], error
        stores = [stage.store for stage in stages] or [Store({}) for _ in pipeline.own_stages]
        guarded = {
            number: FailureGuard(
                failed or stages[part],
                stores[part],
                lambda chunk: torch.zeros(work.shape(chunk), dtype=dtype, device=programs.device),
                first=number == 0,
                last=number == pipeline.stages - 1,
            )
            for part, number in enumerate(pipeline.own_stages)
        }
        if len(stages) > 1:
            computes = dict(zip(pipeline.own_stages, stages, strict=True))
            reduce_in_turn(computes, work.plan.rank_orders[pipeline.rank])
        self._committed = True
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(stage)
            records, failure = programs.run(program, guarded, StageStores(stores), links, meter)
        took = 0.0
        raised = next((guard.error for guard in guarded.values() if guard.error), None)
        if raised is None and failure is None:
            for each in batches:
                each.finish()
            if not call.forward_only and programs.groups is not None:
                for seconds, number in zip(pipeline.seconds, pipeline.own_stages, strict=True):
                    seconds.saw(work.sizes_3C, tuple(r for r in records if r.stage == number))
                took = records[-1].stop
        self._judge(call, pipeline, work.plan, bool(stages), took, raised, failure)
        if self.settings.observe is not None:
            self.settings.observe(CallRecord(work.plan, records, meter.peak_bytes))
        return stages

    def _judge(
        self,
        call: LoopCall,
        pipeline: ModelPipeline,
        plan: Plan,
        begun: bool,
        took_seconds: float,
        error: Exception | None,
        failure: Any,
    ) -> None:
        """Exchange success or failure with all ranks of the replica. Raises where a rank failed.

        ``begun``: whether this rank could compute at all; where none could, nothing has happened
        yet, and Megatron's schedule can run the call. ``took_seconds``: this rank's ops, from the
        call's beginning; 0 where they are no measure.
        """
        pipeline.current_op.enter("what became of the call on all ranks of the replica")
        refusal = str(error) if isinstance(error, ValueError) else None
        if failure is not None:
            error = MemoryError(
                f"{failure.op} of stage {failure.stage} on pipeline rank {failure.rank}: out of "
                f"memory ({failure.reason})"
            )
        words = None if error is None else error_text(error)
        rates = [learnt.rates for learnt in pipeline.seconds]
        measured = all(learnt.measured for learnt in pipeline.seconds)
        mine = RankStatus((pipeline.rank, rates, measured, took_seconds, begun), refusal, words)
        every = gather_statuses(mine, pipeline.control)
        if error is not None and not any(told.value[4] for told in every):
            self._committed = attached(call.one_model) is not None
            if call.config.timers is not None:
                call.config.timers("forward-backward").stop()
            raise error
        # Rows that a stage before was wrong about are no mistake of this one's forward step.
        before = range(pipeline.stages if pipeline.interleaved else pipeline.rank)
        others = set(before) - {pipeline.rank}
        misled = any(told.refusal and told.value[0] in others for told in every)
        if error is not None and refusal is None and not misled:
            raise error
        try:
            raise_what_others_met(every, pipeline.control)
        except (ValueError, LoopFailed) as heard:
            raise heard from error
        if pipeline.measured and plan.predicted is not None:  # else it was predicted by a guess
            pipeline.track_record.saw(
                plan.predicted.planner != AS_GIVEN,
                plan.predicted.seconds,
                max(told.value[3] for told in every),
            )
        # The first rank of a stage speaks for it: all ranks reckon with the same numbers.
        pipeline.learn({told.value[0]: told.value[1:3] for told in reversed(every)})


def _ranks_of_rows(config: Any, groups: Any) -> int:
    return int(
        groups.cp.size() * (groups.tp.size() if getattr(config, "sequence_parallel", False) else 1)
    )


def _other_pipeline(collection: Any) -> str | None:
    theirs = dist.get_process_group_ranks(collection.pp)
    mine = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    return None if theirs == mine else "pipelines other than Megatron's global groups say"
