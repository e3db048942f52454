"""Pipelines of a loop's models: the state that this rank caches for each model."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.ir import Plan, check, check_op_template
from megatron_epp.mcore.job.emergency_exit import end_now
from megatron_epp.mcore.kinds.registry import LAYER_KINDS, lockstep_of
from megatron_epp.mcore.loops.agreement import Arrivals, LoopRefusal, exchange
from megatron_epp.mcore.loops.attached import attached
from megatron_epp.mcore.loops.call_arguments import LoopCall
from megatron_epp.mcore.loops.replica_groups import initialise_communicator, make_replica_groups
from megatron_epp.mcore.loops.settings import Settings
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.split_backward import has_engines, kept_in_input
from megatron_epp.mcore.patching import patch_points
from megatron_epp.mcore.patching.cuda_host import one_queue
from megatron_epp.planner.calls.call_cost import guessed_rates, guessed_token_bytes
from megatron_epp.planner.calls.call_options import CallOptions, bytes_of_1f1b
from megatron_epp.planner.calls.stage_seconds import StageSeconds
from megatron_epp.runtime.executor import CurrentOp, OutsidePhase
from megatron_epp.runtime.program_runner import ProgramRunner
from megatron_epp.runtime.rebuilt import InitialisedGroups
from megatron_epp.runtime.watcher import Watcher

logger = logging.getLogger(__name__)

SETUP = OutsidePhase("the set-up of every stage of the replica")
PLANNING = OutsidePhase("the plan of a call, which one rank makes")
MOST_PLANS = 64  # limit of cached plans


@dataclass
class ModelPipeline:
    """Pipeline of one model.

    Attributes:
        group: Megatron's pipeline group for which ``programs`` was created; Megatron may later
            replace its groups.
        programs: Runner of this rank's programs, with the process groups of this package.
        rank: Pipeline rank of this process, which is also the index of its stage.
        layers: Number of layers of every stage.
        rates_SK3: [stages, op kinds, 3] Seconds per token, per query-key pair and per op
            (planner/calls/stage_seconds.py).
        seconds: Measured seconds of this rank's ops.
        token_bytes: Estimated bytes of a token's activations from forward to backward, for each
            stage; only the ratios between stages are meaningful.
        plans: Cached plans of the replicas that run in lockstep, or of this replica; all their
            ranks request plans in the same order.
        had_bytes: Largest estimate so far of the bytes that 1F1B needs on a stage.
        split_refused: Reason why no stage may split backwards; None if all stages can.
    """

    group: Any
    programs: ProgramRunner
    rank: int
    layers: tuple[int, ...]
    rates_SK3: np.ndarray
    seconds: StageSeconds
    token_bytes: tuple[float, ...]
    split_refused: str | None
    plans: dict[object, tuple[Plan, ...]] = field(default_factory=dict)
    had_bytes: float = 0.0

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def replica(self) -> int:
        """Number of this rank's replica among those that run in lockstep."""
        return 0 if self.programs.groups is None else self.programs.groups.replica

    @property
    def lockstep(self) -> int:
        """Number of replicas that run in lockstep."""
        return 1 if self.programs.groups is None else self.programs.groups.lockstep

    @property
    def current_op(self) -> CurrentOp:
        """Record of this rank's current op or phase, which the watcher reports."""
        return self.programs.current_op

    def options(self, call: LoopCall, tokens: Sequence[Sequence[int]]) -> CallOptions:
        """Return the options for planning ``call``, and update ``had_bytes``.

        All ranks that plan the call compute equal options. In validation calls, plans do not
        reorder micro-batches.

        Args:
            call: The call.
            tokens: Number of tokens of each replica's micro-batches.
        """
        if not call.forward_only and self.stages > 1:
            now = (bytes_of_1f1b(of, self.stages, self.token_bytes).max() for of in tokens)
            self.had_bytes = max(self.had_bytes, *map(float, now))
        if call.first_val_step is not None and call.forward_only:
            return CallOptions(False, False)
        return CallOptions(
            reorder=not any(p.replays(call.config) for p in LAYER_KINDS),
            split=self.split_refused is None,
            token_bytes=self.token_bytes,
            had_bytes=self.had_bytes if not call.forward_only else 0.0,
        )

    def planned(self, key: object, make: Callable[[], tuple[Plan, ...]]) -> tuple[Plan, ...]:
        """Return the cached plans for ``key``, or plans that rank 0 makes, checks and broadcasts.

        The first call compiles the planner on one rank, which may take half a minute on a busy
        host. Therefore this method enters the planning phase, in which the watcher is more patient.

        Raises:
            ValueError: ``make`` raised it, or a plan is invalid; on several ranks, the error is a
                LoopRefusal.
            LoopFailed: ``make`` raised another exception; rank 0 raises that exception itself.
        """

        def checked() -> tuple[Plan, ...] | None:
            if groups is not None and groups.control.rank():
                return None
            plans = make()
            for plan in plans:
                check(plan)
            check_op_template(plans)
            return plans

        groups = self.programs.groups
        self.current_op.enter(PLANNING)
        if key not in self.plans:
            plans, *_ = exchange(self.programs, PLANNING, checked)
            assert plans is not None, "rank 0 has made them"
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            self.plans[key] = plans
        return self.plans[key]

    def slowest(self, every: Sequence[tuple[int, np.ndarray]], sizes_3C: np.ndarray) -> np.ndarray:
        """Return the rates [stages, op kinds, 3] of the slowest rank of every stage in the call.

        Args:
            every: (pipeline rank, rates [op kinds, 3]) of all ranks that planned the call together.
                Rates are seconds per token, per query-key pair and per op.
            sizes_3C: [3, chunks] tokens, query-key pairs and 1 of every chunk of the call.
        """
        totals_3 = sizes_3C.sum(axis=1)
        of_stages = [[rates for rank, rates in every if rank == s] for s in range(self.stages)]
        return np.stack([max(of, key=lambda r: float((r @ totals_3).sum())) for of in of_stages])


class Pipelines:
    """Cache of the pipelines of all called models.

    Models with the same Megatron pipeline group, and equally many replicas in lockstep, share the
    process groups of this package.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._known: WeakKeyDictionary[Any, ModelPipeline] = WeakKeyDictionary()
        # By number of replicas in lockstep.
        self._programs: dict[int, tuple[Any, ProgramRunner, InitialisedGroups]] = {}
        self._arrivals: dict[int, Arrivals] = {}

    def of(self, call: LoopCall, ranks: int) -> ModelPipeline:
        """Return the pipeline of the call's model; create the pipeline for a new model.

        If the pipeline is new, all ranks of the replica must call this method; if its process
        groups are new, too, all ranks of the world must call it.

        Args:
            call: The call.
            ranks: Number of pipeline ranks.

        Raises:
            LoopRefusal: A rank cannot set up its stage.
            LoopFailed: Another rank failed while it set up its stage (:func:`exchange`).
        """
        alone = ranks == 1 and lockstep_of(call.config) == 1
        group = None if alone else mpu.get_pipeline_model_parallel_group()
        programs = None if alone else self._programs_of(group, call.config)
        pipeline = self._known.get(call.one_model)
        if (
            pipeline is None
            or pipeline.group is not group
            or programs not in (None, pipeline.programs)
        ):
            programs = programs or ProgramRunner(this_device(), CurrentOp(0), catch_errors=True)
            pipeline = self._known[call.one_model] = self._make(call, group, ranks, programs)
        return pipeline

    def agreed(self, call: LoopCall, reason: str | None) -> str | None:
        """Return the reason why Megatron's schedule must run the call on all replicas in lockstep.

        It is the first reason that a rank gives, or None if a plan can run the call. All ranks of
        these replicas must call this method.

        Args:
            call: The call.
            reason: The reason on this rank; None if a plan can run the call.

        Raises:
            LoopRefusal: Megatron's schedule cannot run the call, either.
        """
        programs = self._programs_of(mpu.get_pipeline_model_parallel_group(), call.config)
        assert programs.groups is not None
        self._arrivals[programs.groups.lockstep].arrive()
        phase = "the same call on all replicas that share experts"
        try:
            every = exchange(programs, phase, lambda: (reason, call.num_microbatches))
        finally:
            programs.current_op.enter(OutsidePhase("what the loop does between two calls"))
        first = next((other for other, _ in every if other), None)
        counts = [count for _, count in every]
        if first and len(set(counts)) > 1:
            raise LoopRefusal(
                f"calls with {first} run by Megatron's own schedule, in which replicas that share "
                f"experts need equally many micro-batches; found {counts} on their ranks"
            )
        return first

    def _make(
        self, call: LoopCall, group: Any, ranks: int, programs: ProgramRunner
    ) -> ModelPipeline:
        rank = 0 if programs.groups is None else programs.groups.pipeline_rank
        active = prod(part.active(call.config) for part in LAYER_KINDS)

        def own_stage() -> tuple[int, tuple[int, int], np.ndarray, str | None]:
            sizes = _layers_and_vocabulary(call.one_model)
            rates = guessed_rates(call.config, *sizes, active)
            return rank, sizes, rates, _split_refused(call.one_model)

        every = exchange(programs, SETUP, own_stage)
        by_rank = {place: (sizes, rates) for place, sizes, rates, _ in reversed(every)}
        of_stages = [by_rank[r][0] for r in range(ranks)]
        rates_SK3 = np.stack([by_rank[r][1] for r in range(ranks)])
        return ModelPipeline(
            group,
            programs,
            rank,
            tuple(layers for layers, _ in of_stages),
            rates_SK3,
            StageSeconds(rates_SK3[rank]),
            guessed_token_bytes(call.config, of_stages, active),
            next((refused for *_, refused in every if refused), None),
        )

    def _programs_of(self, group: Any, config: Any) -> ProgramRunner:
        """Return the program runner for Megatron's pipeline ``group``, and cache it.

        The runner's process groups are initialised again if a framework rebuilt the communicators.
        """
        device, lockstep = this_device(), lockstep_of(config)
        known = self._programs.get(lockstep)
        programs, communicators = known[1:] if known and known[0] is group else (None, None)
        if programs is None:
            groups = make_replica_groups(device, self.settings.timeout, config, lockstep)
            current_op = CurrentOp(groups.pipeline_rank)
            costs = one_queue(device)
            if costs is not None and dist.get_rank() == 0:
                logger.warning("%s", costs)
            watched = (current_op, groups.pipeline_ranks, dist.get_rank(), groups.timeout)
            arrivals = self._arrivals[lockstep] = Arrivals(groups.control)
            Watcher(
                *watched, end=end_now, together=groups.in_lockstep, missing=arrivals.missing
            ).start()
            programs = ProgramRunner(device, current_op, groups, catch_errors=True)
        assert programs.groups is not None, "there are several stages"
        if communicators is None or communicators.anew:
            initialise_communicator(programs.groups, device, config)
            communicators = InitialisedGroups(
                [programs.groups.control, *programs.groups.payload.values()]
            )
            self._programs[lockstep] = group, programs, communicators
        return programs


def _split_refused(model: Any) -> str | None:
    """Return the reason why ``model`` cannot split backwards; None if it can."""
    if has_engines(model):
        return "the split backward of Transformer Engine's linears was timed in no loop"
    if kept := kept_in_input(model):
        return f"{' and '.join(kept)} fuse gradient accumulation"
    try:
        patch_points.install([patch_points.COLUMN_LINEAR, patch_points.ROW_LINEAR])
    except ValueError as refusal:
        return str(refusal)
    return None


def _layers_and_vocabulary(model: Any) -> tuple[int, int]:
    """Return the number of layers and of vocabulary rows of a stage; 0 rows without LM head."""
    state = attached(model)
    assert state is not None, "the schedule plans calls of attached models only"
    part = state.part
    return len(part.decoder.layers), part.vocab_size if part.post_process else 0
