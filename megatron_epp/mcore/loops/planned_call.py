"""One call of Megatron's schedule function, planned and executed by this package."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_epp.ir import MAKE_GRADIENTS, Plan, lower_rank
from megatron_epp.mcore.data.row_shard import RowShard, row_block
from megatron_epp.mcore.kinds.registry import require_shared
from megatron_epp.mcore.loops.attached import AttachedModel, attached
from megatron_epp.mcore.loops.call_arguments import LoopCall, fixed_shape, process_groups
from megatron_epp.mcore.loops.failure_guard import FailureGuard
from megatron_epp.mcore.loops.framework_readers import (
    COMMON_FORM,
    FrameworkReader,
    ShapeWitness,
    reader_of,
)
from megatron_epp.mcore.loops.micro_batch_stage import MicroBatchStage
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches
from megatron_epp.mcore.loops.pipelines import ModelPipeline
from megatron_epp.mcore.loops.replica.rank_status import (
    LoopFailed,
    RanksDiffer,
    RankStatus,
    error_text,
    gather_statuses,
    raise_remote_failure,
)
from megatron_epp.mcore.loops.replica.read_batches import read_documents, read_shapes
from megatron_epp.mcore.loops.replica.redone_call import (
    CallState,
    MisreadCall,
    ShapeVote,
    WrongShape,
)
from megatron_epp.mcore.loops.replica.replica_plans import counted
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.stage import last_op, reduce_in_turn, reserve_exchange
from megatron_epp.mcore.placing.part_config import config_of_part
from megatron_epp.planner.calls.call_cost import features
from megatron_epp.planner.calls.call_options import AS_CALLED, CallOptions
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.runtime.executor import OutsidePhase
from megatron_epp.runtime.kv_store import StageStores, Store
from megatron_epp.runtime.memory_meter import Meter, NoMeter

LoopStage = MicroBatchStage | SliceStage


@dataclass(frozen=True, slots=True)
class CallWork:
    """Plan of a call, with the functions that this rank needs to execute the plan.

    Attributes:
        plan: Plan of the replica.
        make_stage: Function (index of a stage on this rank) -> the stage for the executor.
        shape: Function (chunk) -> shape of the chunk's message.
        sizes_3C: Features of all chunks (call_cost.features), to which op times are fitted.
    """

    plan: Plan
    make_stage: Callable[[int], LoopStage]
    shape: Callable[[int], tuple[int, ...]]
    sizes_3C: np.ndarray


@dataclass(frozen=True, slots=True)
class MessageExtents:
    """Shapes of a call's micro-batches and messages.

    Attributes:
        shapes: Shape of every micro-batch.
        fixed: Shape of all messages; None if message shapes differ.
        parts: Number of ranks of a stage over which the rows of a micro-batch are sharded.
        hidden: Hidden size; 0 if ``fixed`` is set, because then it is not used.
    """

    shapes: Sequence[MicrobatchShape]
    fixed: tuple[int, ...] | None
    parts: int
    hidden: int

    def message(self, chunk: int) -> tuple[int, ...]:
        """Return the shape of the message that this rank sends to the next stage for ``chunk``."""
        shape = self.shapes[chunk]
        return self.fixed or (shape.rows // self.parts, shape.samples, self.hidden)


class PlannedCall:
    """One call of the schedule function by an external training loop, executed by a plan.

    ``count()`` returns the number of this call. After an error, Megatron's own schedule runs the
    call if ``committed`` is false. ``committed`` is always true for an attached model. Otherwise it
    becomes true before the first op or in :meth:`_show`, and false again if no rank could begin.
    """

    def __init__(
        self, settings: Settings, call: LoopCall, pipeline: ModelPipeline, count: Callable[[], int]
    ):
        self.settings, self.call, self.pipeline, self._count = settings, call, pipeline, count
        self.batches = [MicroBatches(each, call.num_microbatches) for each in call.iterators]
        self.model: AttachedModel | None = attached(call.one_model)
        self.committed = self.model is not None
        self.reading: FrameworkReader | None = None  # its rules may be wrong
        self._state: CallState | None = None  # before the ops

    @property
    def first_rank(self) -> int:
        """First global rank of the replica; 0 with a single pipeline stage."""
        control = self.pipeline.control
        return 0 if control is None else dist.get_global_rank(control, 0)

    def undo(self) -> None:
        """Restore the random states, buffers and gradients that :meth:`run` saved, if any."""
        if self._state is not None:
            self._state.restore()

    def with_batches_from_the_start(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Return ``keywords`` with data iterators that yield all micro-batches, even drawn ones."""
        if not any(batches.drawn for batches in self.batches):
            return keywords
        iterators = [batches.from_the_start() for batches in self.batches]
        return {**keywords, "data_iterator": iterators if len(iterators) > 1 else iterators[0]}

    def result(self, keywords: dict[str, Any], pipelined: Callable[..., Any]) -> list[Any] | None:
        """Run the call and return Megatron's forward_data_store; None if no plan can run it.

        In training, gradients are finalised. Megatron's own schedule, ``pipelined``, runs the first
        calls of a framework. Raises MisreadCall, LoopRefusal, LoopFailed, or the loop's errors.
        """
        call, pipeline, config = self.call, self.pipeline, self.call.config
        slicing = self.model is not None and self.model.slicing
        try:
            groups = process_groups(call)
            needs_shapes = pipeline.stages > 1 and not slicing
            fixed = fixed_shape(call, groups) if needs_shapes else None
            reader = self.settings.lengths
            if needs_shapes and reader is None and fixed is None:
                if not pipeline.interleaved:
                    reader = reader_of(call, groups)
                self.reading = reader or COMMON_FORM
        except Exception as error:  # the other ranks wait for this rank's status
            gather_statuses(RankStatus(error=error_text(error)), pipeline.control)
            raise
        if pipeline.unlike is not None and self.reading is not None:
            return None
        if slicing:
            work = self._slices(groups)
        else:
            try:
                shapes = read_shapes(call, pipeline, self.batches[0], fixed, reader)
            except RanksDiffer as differ:
                if not isinstance(reader, FrameworkReader):
                    raise
                pipeline.unlike = f"micro-batches as {reader.framework} lays them out: {differ}"
                return None
            if shapes is None:
                return None
            if isinstance(reader, FrameworkReader) and pipeline.in_lockstep:
                # After a misread, ops end early, and ranks of other replicas would block.
                pipeline.unlike = (
                    f"ops that meet other replicas', on rows read as {reader.framework}'s"
                )
                return None
            varies = pipeline.stages > 1 and fixed is None
            # A configuration may lack hidden_size if shapes do not vary.
            hidden = config.hidden_size if varies else 0
            available = MessageExtents(shapes, fixed, _ranks_of_rows(config, groups), hidden)
            if isinstance(reader, FrameworkReader) and not pipeline.shown:
                return self._show(available, reader, keywords, pipelined)
            work = _unsliced_work(self, groups, available)
        stages = self.run(work)
        if config.finalize_model_grads_func is not None and not call.forward_only:
            total = torch.zeros([], dtype=torch.int, device=this_device())
            config.finalize_model_grads_func(
                call.models,
                sum((stage.tokens for stage in stages), total)
                if config.calculate_per_token_loss
                else None,
                pg_collection=groups,
                force_all_reduce=call.force_all_reduce,
            )
        self._stop_timer()
        return stages[-1].in_callers_order()

    def _stop_timer(self) -> None:
        if self.call.config.timers is not None:
            self.call.config.timers("forward-backward").stop()

    # -------------------------------------------------------------- before the ops

    def _show(
        self,
        extents: MessageExtents,
        reader: FrameworkReader,
        keywords: dict[str, Any],
        pipelined: Callable[..., Any],
    ) -> list[Any]:
        """Run the call with Megatron's own schedule, and compare output shapes with ``extents``.

        A framework's first calls run this way: two if message shapes vary, else three. If an output
        has another shape than expected, ``pipeline.unlike`` is set.
        """
        pipeline = self.pipeline
        pipeline.current_op.enter(
            OutsidePhase("one of the first calls, which Megatron's schedule runs")
        )
        witness = ShapeWitness(keywords["forward_step_func"])
        iterator = self.batches[0].from_the_start()
        self.committed = True
        result: list[Any] = pipelined(
            **{**keywords, "forward_step_func": witness, "data_iterator": iterator}
        )
        last = pipeline.rank == pipeline.stages - 1
        expected = [extents.message(number) for number in range(len(extents.shapes))]
        status = RankStatus(None if last else witness.unlike(expected, reader))
        statuses = gather_statuses(status, pipeline.control)
        pipeline.unlike = next((status.value for status in statuses if status.value), None)
        pipeline.witnessed.append(frozenset(map(tuple, expected)))
        return result

    def _slices(self, groups: Any) -> CallWork:
        """Return the work of a call in slicing mode, whose documents are cut into slices."""
        call, pipeline, model, batches = self.call, self.pipeline, self.model, self.batches[0]
        assert model is not None, "slices are cut of an attached model's documents"
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
        row_shard = RowShard(groups.cp.size(), groups.cp.rank(), splits, row_block(config))

        def make_stage(part: int) -> LoopStage:
            rank = pipeline.rank
            stage = SliceStage(call, batches, plan, rank, groups, model, forests, row_shard)
            reserve_exchange(stage, (plan,), row_shard)
            return stage

        def shape(chunk: int) -> tuple[int, ...]:
            return row_shard.message(row_shard.rows(plan.chunks[chunk])), 1, config.hidden_size

        chunks = range(len(plan.chunks))
        sizes = features([c.tokens for c in plan.chunks], [plan.pairs(c) for c in chunks])
        return CallWork(plan, make_stage, shape, sizes)

    # -------------------------------------------------------------- the ops, and after them

    def run(self, work: CallWork) -> list[LoopStage]:
        """Execute this rank's ops; return its stages. Collective; all ranks raise if one fails."""
        call, pipeline, config = self.call, self.pipeline, self.call.config
        programs = pipeline.programs
        programs.current_op.iteration = self._count()
        dtype = config.pipeline_dtype or getattr(config, "params_dtype", torch.float32)
        # Replicas in lockstep must not wait for each other's messages, too.
        block = (counted(work.plan),) if pipeline.in_lockstep else ()
        program = lower_rank(work.plan, pipeline.rank, block)
        links = programs.links(lambda message: work.shape(message.chunk), dtype)
        meter: Meter = NoMeter()
        stages: list[LoopStage] = []
        failed: Exception | None = None
        vote: ShapeVote | None = None
        last_ops = [last_op(order, MAKE_GRADIENTS) for order in work.plan.orders]
        if self.reading is not None:
            self._state = CallState(call.models, not call.forward_only)
            for batches in self.batches:
                batches.repeatable = True
            if not call.forward_only:
                vote = ShapeVote(pipeline.control, len(work.plan.chunks) * len(pipeline.seconds))
        try:
            meter = self.settings.make_meter(call.one_model)
            for part in range(len(pipeline.local_stages)):
                stages.append(work.make_stage(part))
        except Exception as error:  # other ranks may have begun and wait for messages
            stages, failed = [], error
        stores = [stage.store for stage in stages] or [Store({}) for _ in pipeline.local_stages]
        guarded = {
            number: FailureGuard(
                failed or stages[part],
                stores[part],
                lambda chunk: torch.zeros(work.shape(chunk), dtype=dtype, device=programs.device),
                first=number == 0,
                last=number == pipeline.stages - 1,
                vote=vote,
                last_op=last_ops[number],
            )
            for part, number in enumerate(pipeline.local_stages)
        }
        if len(stages) > 1:
            computes = dict(zip(pipeline.local_stages, stages, strict=True))
            reduce_in_turn(computes, work.plan.rank_orders[pipeline.rank])
        self.committed = True
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(stage)
            records, failure = programs.run(program, guarded, StageStores(stores), links, meter)
            for stage in stages if vote is not None and not vote.passed else ():
                stage.reduces = False
        seconds = 0.0
        errors = [guard.error for guard in guarded.values() if guard.error is not None]
        raised = next((e for e in errors if isinstance(e, WrongShape)), next(iter(errors), None))
        went_well = raised is None and failure is None
        if went_well and not call.forward_only and programs.groups is not None:
            for learnt, number in zip(pipeline.seconds, pipeline.local_stages, strict=True):
                learnt.saw(work.sizes_3C, tuple(r for r in records if r.stage == number))
            seconds = records[-1].stop
        refusal = str(raised) if isinstance(raised, ValueError) else None
        if failure is not None:
            raised = MemoryError(
                f"{failure.op} of stage {failure.stage} on pipeline rank {failure.rank}: out of "
                f"memory ({failure.reason})"
            )
        self._exchange(work.plan, bool(stages), seconds, raised, refusal)
        for batches in self.batches:
            batches.finish()
        if self.settings.observe is not None:
            self.settings.observe(CallRecord(work.plan, records, meter.peak_bytes))
        return stages

    def _exchange(
        self,
        plan: Plan,
        begun: bool,
        seconds: float,
        error: Exception | None,
        refusal: str | None,
    ) -> None:
        """Exchange success or failure with all ranks of the replica; raise if any rank failed.

        ``begun`` is true if this rank could create its stages. If no rank could do so, nothing has
        changed, and Megatron's schedule can run the call. ``seconds`` is the time of this rank's
        ops, or 0 if not measured. ``refusal`` is the message of an error in the loop's input.
        """
        pipeline = self.pipeline
        pipeline.current_op.enter("what became of the call on all ranks of the replica")
        rates = [learnt.rates for learnt in pipeline.seconds]
        measured = all(learnt.measured for learnt in pipeline.seconds)
        text = None if error is None else error_text(error)
        unlike = None
        if self.reading is not None and isinstance(error, WrongShape):
            unlike = self.reading.unlike(error.chunk, error.expected, error.came)
        status = RankStatus((pipeline.rank, rates, measured, seconds, begun, unlike), refusal, text)
        statuses = gather_statuses(status, pipeline.control)
        unlike = next((status.value[5] for status in statuses if status.value[5]), None)
        if unlike is not None:
            pipeline.unlike = unlike
            self._stop_timer()
            raise MisreadCall(unlike) from error
        if error is not None and not any(status.value[4] for status in statuses):
            self.committed = self.model is not None
            self._stop_timer()
            raise error
        # This stage's error may follow from wrong rows of an earlier stage, which is then raised.
        before = range(pipeline.stages if pipeline.interleaved else pipeline.rank)
        senders = set(before) - {pipeline.rank}
        misled = any(status.refusal and status.value[0] in senders for status in statuses)
        if error is not None and refusal is None and not misled:
            raise error
        try:
            raise_remote_failure(statuses, pipeline.control)
        except (ValueError, LoopFailed) as heard:
            raise heard from error
        if pipeline.measured and plan.predicted is not None:  # else a guess predicted it
            pipeline.track_record.saw(
                plan.predicted.planner != AS_CALLED,
                plan.predicted.seconds,
                max(status.value[3] for status in statuses),
            )
        # All ranks use the rates of each stage's first rank, so that their rates are equal.
        pipeline.learn({status.value[0]: status.value[1:3] for status in reversed(statuses)})


def _unsliced_work(planned: PlannedCall, groups: Any, extents_of_call: MessageExtents) -> CallWork:
    """Return the work of a call in scheduling mode, with every micro-batch as a chunk."""
    call, pipeline, settings = planned.call, planned.pipeline, planned.settings
    extents = extents_of_call.shapes
    make, layers, rates = settings.make_plan, pipeline.layers, pipeline.rates_SK3
    # Rates that were not measured, or not recently, may rank the orders wrongly.
    wanted = settings.options
    tells = not call.forward_only and (planned.model is None or planned.model.memory is None)
    if not pipeline.measured or (tells and pipeline.track_record.due):
        wanted = CallOptions(False, False)
    options = pipeline.options(call, wanted, [extent.tokens for extent in extents])
    if planned.model is not None:
        options = replace(options, memory=planned.model.memory)
    key = (tuple(extents), call.forward_only, options, rates.tobytes())
    place = [tuple(s % pipeline.ranks for s in range(pipeline.stages))]
    places = place if pipeline.interleaved else []
    plan = pipeline.plan(
        key, lambda: make(extents, layers, rates, options, call.forward_only, *places)
    )

    def make_stage(part: int) -> LoopStage:
        stage, cp = pipeline.local_stages[part], groups.cp.size()
        of_part = [part, config_of_part(call.config, part)] if pipeline.interleaved else []
        return settings.make_stage(
            call.of_part(part),
            planned.batches[part],
            plan,
            stage,
            cp,
            extents_of_call.message,
            *of_part,
        )

    sizes = features([e.tokens for e in extents], [e.pairs for e in extents])
    return CallWork(plan, make_stage, extents_of_call.message, sizes)


def _ranks_of_rows(config: Any, groups: Any) -> int:
    return int(
        groups.cp.size() * (groups.tp.size() if getattr(config, "sequence_parallel", False) else 1)
    )
