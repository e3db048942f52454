"""The schedule that loops of others call: Megatron's contract, run as a plan.

One object stands in for both of Megatron's schedules without interleaving. What it keeps between
calls is what it has learnt: process groups of this replica, seconds of ops, plans.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model

from megatron_epp.ir import Plan, PlanError, Timed, lower_stage
from megatron_epp.mcore.loops.adapter import lengths_of
from megatron_epp.mcore.loops.agreement import (
    LoopFailed,
    Told,
    agreed,
    exchange,
    raise_what_others_met,
    refused_by,
)
from megatron_epp.mcore.loops.attached import AttachedModel, attached
from megatron_epp.mcore.loops.calls import LoopCall, fixed_shape, not_ours, process_groups
from megatron_epp.mcore.loops.draws import MicroBatches
from megatron_epp.mcore.loops.extents import Extent, Extents, measured
from megatron_epp.mcore.loops.guarded import Guarded
from megatron_epp.mcore.loops.micro_batch_stage import MicroBatchStage
from megatron_epp.mcore.loops.plans.call_plan import Freedom, Planning, whole_plan
from megatron_epp.mcore.loops.plans.stage_seconds import StageSeconds, features, guessed_rates
from megatron_epp.mcore.loops.replica_groups import make_replica_groups
from megatron_epp.mcore.loops.slice_stage import SliceStage
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.split_backward import has_engines, refuse_split
from megatron_epp.mcore.patching import seams
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.executor import BEFORE, Elsewhere, Executor, Waiting
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter, NoMeter
from megatron_epp.runtime.watcher import Watcher

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a call on this rank. plan: that ran; records: of its ops here; peak_bytes: the
    most that chunks held, where a meter was given."""

    plan: Plan
    records: tuple[Timed, ...]
    peak_bytes: int


def _sliced_plan(*arguments: Any) -> Plan:
    # Imported where plans are made: the compiler takes a second to load.
    from megatron_epp.mcore.loops.plans.slicing import sliced_plan

    return sliced_plan(*arguments)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user says; see :func:`megatron_epp.install_schedule`."""

    lengths: Extents | None = None
    freedom: Freedom = field(default_factory=Freedom)
    split_engines: bool = False  # split backwards of Transformer Engine's linears, too
    timeout: timedelta = TIMEOUT
    observe: Callable[[Ran], None] | None = None
    make_meter: Callable[[Any], Meter] = lambda model: NoMeter()
    make_plan: Callable[..., Plan] = whole_plan
    make_sliced_plan: Callable[..., Plan] = _sliced_plan
    make_stage: Callable[..., MicroBatchStage] = MicroBatchStage


@dataclass
class _Pipeline:
    """A model's pipeline as this rank knows it, from the model's first call on."""

    group: Any  # Megatron's, of which it was made; Megatron may make its groups anew
    groups: Groups | None  # None: one stage, alone
    stage: int
    stages: int
    layers: tuple[int, ...]
    rates_SK3: np.ndarray
    seconds: StageSeconds
    planning: Planning
    waiting: Waiting
    split_refused: str | None
    measured: bool = False  # whether ``rates_SK3`` are, on all stages

    @property
    def control(self) -> Any:
        return None if self.groups is None else self.groups.control


class LoopSchedule:
    """``stock``: Megatron's own schedule by whether there are several stages."""

    def __init__(self, settings: Settings, stock: dict[bool, Callable[..., Any]]):
        self.settings, self.stock = settings, stock
        self._pipelines: WeakKeyDictionary[Any, _Pipeline] = WeakKeyDictionary()
        self._groups: tuple[Any, Groups, Waiting] | None = None
        self._said: set[str] = set()
        self._calls = 0
        self._clock: HostClock | CudaClock | None = None
        self._heap: HostHeap | None = None

    # -------------------------------------------------------------- a call

    def __call__(self, pipelined: bool, keywords: dict[str, Any]) -> list[Any]:
        call = LoopCall.of(keywords)
        if pipelined and not mpu.model_parallel_is_initialized():
            return self._leave("pipelines without Megatron's global groups", pipelined, keywords)
        stages = mpu.get_pipeline_model_parallel_world_size() if pipelined else 1
        reason = not_ours(call, stages)
        if reason is None and pipelined and call.pg_collection is not None:
            reason = self._other_pipeline(call.pg_collection)
        if reason is not None:
            return self._leave(reason, pipelined, keywords)
        try:
            pipeline = self._pipeline(call, stages)
        except ValueError as refusal:  # such a world that our messages would stand still in it
            return self._leave(str(refusal), pipelined, keywords)
        batches = MicroBatches(call.one_iterator, call.num_microbatches)
        try:
            found = self._serve(call, pipeline, batches)
        finally:
            pipeline.waiting.enter(Elsewhere("what the loop does between two calls"))
        if found is None:
            return self._leave(
                "micro-batches of several lengths that nobody tells (install_schedule(lengths=))",
                pipelined,
                {**keywords, "data_iterator": batches.from_the_start()},
            )
        return found

    def _serve(
        self, call: LoopCall, pipeline: _Pipeline, batches: MicroBatches
    ) -> list[Any] | None:
        """What the loop is returned; None where the call cannot be planned."""
        groups, config = process_groups(call), call.config
        sliced = attached(call.one_model)
        work: _Work | None
        if sliced is not None and sliced.slicing:
            work = self._sliced(call, pipeline, batches, groups, sliced)
        else:
            work = self._whole(call, pipeline, batches, groups)
        if work is None:
            return None
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        self._run(call, pipeline, batches, work)
        if config.finalize_model_grads_func is not None and not call.forward_only:
            total = torch.zeros([], dtype=torch.int, device=this_device()) + work.stage.tokens
            config.finalize_model_grads_func(
                [call.one_model],
                total if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=call.force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return work.stage.in_callers_order()

    def _leave(self, reason: str, pipelined: bool, keywords: dict[str, Any]) -> list[Any]:
        """Megatron's own schedule runs the call; said once for every reason, by one rank."""
        if reason not in self._said:
            self._said.add(reason)
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning("Megatron's own schedule runs calls with %s", reason)
        return self.stock[pipelined](**keywords)

    def _other_pipeline(self, collection: Any) -> str | None:
        theirs = dist.get_process_group_ranks(collection.pp)
        mine = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
        return None if theirs == mine else "pipelines other than Megatron's global groups say"

    # -------------------------------------------------------------- before the ops

    def _pipeline(self, call: LoopCall, stages: int) -> _Pipeline:
        """What is known of the call's model. Collective where it is new."""
        group = None if stages == 1 else mpu.get_pipeline_model_parallel_group()
        made = self._pipelines.get(call.one_model)
        if made is None or made.group is not group:
            made = self._pipelines[call.one_model] = self._make_pipeline(call, group, stages)
        return made

    def _groups_of(self, group: Any) -> tuple[Groups | None, Waiting]:
        """Ours, made once for Megatron's pipeline ``group``; models share them."""
        if group is None:
            return None, Waiting(0)
        if self._groups is None or self._groups[0] is not group:
            groups = make_replica_groups(this_device(), self.settings.timeout)
            waiting = Waiting(groups.stage)
            waiting.enter(BEFORE)
            Watcher(waiting, groups.pipeline_ranks, dist.get_rank(), groups.timeout).start()
            self._groups = group, groups, waiting
        return self._groups[1:]

    def _make_pipeline(self, call: LoopCall, group: Any, stages: int) -> _Pipeline:
        groups, waiting = self._groups_of(group)
        stage = 0 if groups is None else groups.stage
        (model,) = unwrap_model([call.one_model])
        decoder = getattr(model, "decoder", None)
        layers = len(getattr(decoder, "layers", ()) or ())
        words = getattr(model, "vocab_size", 0) if getattr(model, "post_process", False) else 0
        seconds = StageSeconds(guessed_rates(call.config, layers, words))
        refused = self._split_refused(call.one_model)
        mine = (stage, layers, seconds.guess, refused)
        every = exchange(Told(mine), None if groups is None else groups.control)
        by_stage = {told.value[0]: told.value for told in reversed(every)}
        return _Pipeline(
            group,
            groups,
            stage,
            stages,
            tuple(by_stage[s][1] for s in range(stages)),
            np.stack([by_stage[s][2] for s in range(stages)]),
            seconds,
            Planning(groups),
            waiting,
            next((told.value[3] for told in every if told.value[3]), None),
        )

    def _split_refused(self, model: Any) -> str | None:
        """Why this stage cannot split backwards; None: it can."""
        if not self.settings.freedom.split:
            return "not wanted"
        try:
            if not self.settings.split_engines and has_engines(model):
                return "no GPU has run the split backward of Transformer Engine's linears yet"
            refuse_split(model)
            seams.install([seams.COLUMN_LINEAR, seams.ROW_LINEAR])
        except (PlanError, ValueError) as refusal:
            return str(refusal)
        return None

    def _extents(
        self,
        call: LoopCall,
        pipeline: _Pipeline,
        batches: MicroBatches,
        shape: tuple[int, ...] | None,
    ) -> list[Extent] | None:
        """The extent of every micro-batch; None where shapes differ and nobody knows them.
        Collective. ValueError: ranks differ, or a rank refuses what it reads; on every rank."""
        count = call.num_microbatches
        if pipeline.stages == 1:
            return [Extent(1)] * count  # order and messages need none
        mine: list[Extent | None] | None = None
        refusal = None
        if shape is None or self.settings.lengths is not None:
            try:
                if batches.readable:
                    mine = [
                        measured(batches.item(number), self.settings.lengths, number)
                        for number in range(count)
                    ]
            except Exception as error:
                refusal = refused_by(error)
        found = self._agreed(call, pipeline, mine, refusal, "it has")
        if shape is not None and (found is None or None in found):
            config = call.config
            parts = mpu.get_context_parallel_world_size()
            parts *= config.tensor_model_parallel_size if config.sequence_parallel else 1
            return [Extent(shape[0] * parts, shape[1])] * count
        if found is None or None in found:
            return None
        return found

    def _whole(
        self, call: LoopCall, pipeline: _Pipeline, batches: MicroBatches, groups: Any
    ) -> "_Work | None":
        """Every micro-batch a chunk; None where their shapes differ and nobody knows them."""
        fixed = fixed_shape(call, groups) if pipeline.stages > 1 else None
        extents = self._extents(call, pipeline, batches, fixed)
        if extents is None:
            return None
        make, layers, rates = self.settings.make_plan, pipeline.layers, pipeline.rates_SK3
        # What was never measured may be wrong about which order is better.
        freedom = self._freedom(call, pipeline) if pipeline.measured else Freedom(False, False)
        key = (tuple(extents), call.forward_only, freedom, rates.tobytes())
        plan = pipeline.planning.plan(
            key, lambda: make(extents, layers, rates, freedom, call.forward_only)
        )
        parts = groups.cp.size()
        if getattr(call.config, "sequence_parallel", False):
            parts *= groups.tp.size()

        def shape(chunk: int) -> tuple[int, ...]:
            extent = extents[chunk]
            return fixed or (extent.rows // parts, extent.samples, call.config.hidden_size)

        stage = self.settings.make_stage(
            call, batches, plan, pipeline.stage, groups.cp.size(), shape
        )
        sizes = features([e.tokens for e in extents], [e.pairs for e in extents])
        return _Work(plan, stage, shape, sizes)

    def _sliced(
        self,
        call: LoopCall,
        pipeline: _Pipeline,
        batches: MicroBatches,
        groups: Any,
        model: AttachedModel,
    ) -> "_Work":
        """The documents of the micro-batches cut into slices."""
        lengths = self._lengths(call, pipeline, batches, model)
        make, layers, rates = self.settings.make_sliced_plan, pipeline.layers, pipeline.rates_SK3
        freedom = self._freedom(call, pipeline)
        key = (tuple(lengths), call.forward_only, freedom, rates.tobytes(), "sliced")
        plan = pipeline.planning.plan(
            key, lambda: make(lengths, layers, rates, freedom, call.forward_only)
        )
        config = call.config
        multiple = groups.tp.size() if config.sequence_parallel else 1
        stage = SliceStage(
            call, batches, plan, pipeline.stage, groups.cp.size(), model, lengths, multiple
        )
        sizes = features([c.tokens for c in plan.chunks], [c.pairs for c in plan.chunks])
        return _Work(
            plan, stage, lambda c: (stage.rows(c) // multiple, 1, config.hidden_size), sizes
        )

    def _lengths(
        self, call: LoopCall, pipeline: _Pipeline, batches: MicroBatches, model: AttachedModel
    ) -> list[tuple[int, ...]]:
        """Of every micro-batch's documents. Collective. ValueError: as ``_extents``."""
        mine, refusal = None, None
        try:
            if batches.readable:
                mine = [
                    lengths_of(model.adapter, batches.item(number), number, model.context)
                    for number in range(call.num_microbatches)
                ]
        except Exception as error:
            refusal = refused_by(error)
        found = self._agreed(call, pipeline, mine, refusal, "documents of")
        if found is None:
            raise ValueError("no rank of the replica has a data iterator; slices need to read one")
        return found

    def _agreed(
        self,
        call: LoopCall,
        pipeline: _Pipeline,
        mine: list[Any] | None,
        refusal: str | None,
        what: str,
    ) -> list[Any] | None:
        pipeline.waiting.enter("what all ranks of the replica have read")
        every = exchange(Told((call.num_microbatches, mine), refusal), pipeline.control)
        raise_what_others_met(every, pipeline.control)
        counts = [told.value[0] for told in every]
        if len(set(counts)) > 1:
            raise ValueError(
                f"num_microbatches differs over the ranks of a pipeline: {counts}; expected one "
                "number"
            )
        return agreed([told.value[1] for told in every], what, pipeline.control)

    def _freedom(self, call: LoopCall, pipeline: _Pipeline) -> Freedom:
        wanted = self.settings.freedom
        if call.first_val_step is not None and call.forward_only:
            return Freedom(False, False)
        return Freedom(
            # The experts' ranks meet inside of layers, those of other replicas too; what routers
            # recorded is replayed in the order of the forwards.
            reorder=wanted.reorder and not getattr(call.config, "num_moe_experts", None),
            split=wanted.split and pipeline.split_refused is None,
            headroom=wanted.headroom,
        )

    # -------------------------------------------------------------- the ops, and behind them

    def _run(
        self, call: LoopCall, pipeline: _Pipeline, batches: MicroBatches, work: "_Work"
    ) -> None:
        config, device, stage = call.config, this_device(), work.stage
        clock, heap = self._instruments(device)
        meter = self.settings.make_meter(call.one_model)
        self._calls += 1
        pipeline.waiting.iteration = self._calls
        dtype = config.pipeline_dtype or getattr(config, "params_dtype", torch.float32)
        payload = {} if pipeline.groups is None else pipeline.groups.payload
        ranks = None if pipeline.groups is None else pipeline.groups.pipeline_ranks
        clock.start()
        guarded = Guarded(
            stage,
            stage.store,
            lambda chunk: torch.zeros(work.shape(chunk), dtype=dtype, device=device),
            first=pipeline.stage == 0,
            last=pipeline.stage == pipeline.stages - 1,
        )
        executor = Executor(
            lower_stage(work.plan, pipeline.stage),
            guarded,
            Links(payload, work.shape, dtype, device, ranks),
            stage.store,
            clock,
            meter,
            pipeline.waiting,
            None if pipeline.groups is None else pipeline.groups.peers,
            heap,
        )
        with stage:
            records = executor.run()
        if guarded.error is None and executor.failure is None:
            batches.finish()
            if not call.forward_only and pipeline.groups is not None:
                pipeline.seconds.saw(work.sizes_3C, records)
        self._judge(pipeline, guarded.error, executor.failure)
        if self.settings.observe is not None:
            self.settings.observe(Ran(work.plan, records, meter.peak_bytes))

    def _instruments(self, device: torch.device) -> tuple[HostClock | CudaClock, HostHeap | None]:
        if self._clock is None:
            on_gpu = device.type == "cuda"
            self._clock = CudaClock() if on_gpu else HostClock()
            self._heap = None if on_gpu else HostHeap()
        return self._clock, self._heap

    def _judge(self, pipeline: _Pipeline, error: Exception | None, failure: Any) -> None:
        """Tell and hear what became of the ops. Collective. Raises where a rank failed."""
        pipeline.waiting.enter("what became of the call on all ranks of the replica")
        refusal = str(error) if isinstance(error, ValueError) else None
        if failure is not None:
            error = MemoryError(f"{failure.op}: out of memory ({failure.reason})")
        words = None if error is None else f"{type(error).__name__}: {error}"
        learnt = pipeline.seconds
        mine = Told((pipeline.stage, learnt.rates, learnt.measured), refusal, words)
        every = exchange(mine, pipeline.control)
        if error is not None and refusal is None:
            raise error
        try:
            raise_what_others_met(every, pipeline.control)
        except (ValueError, LoopFailed) as heard:
            raise heard from error
        # The first rank of a stage speaks for it: all ranks reckon with the same numbers.
        by_stage = {told.value[0]: told.value for told in reversed(every)}
        pipeline.rates_SK3 = np.stack([by_stage[s][1] for s in range(pipeline.stages)])
        pipeline.measured = all(by_stage[s][2] for s in range(pipeline.stages))


@dataclass(frozen=True, slots=True)
class _Work:
    """What a call comes to on this rank. shape: of a chunk's message; sizes_3C: of all chunks."""

    plan: Plan
    stage: MicroBatchStage | SliceStage
    shape: Callable[[int], tuple[int, ...]]
    sizes_3C: np.ndarray
