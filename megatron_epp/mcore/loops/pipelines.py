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
from megatron.core.utils import unwrap_model

from megatron_epp.ir import Plan, check
from megatron_epp.mcore.job.emergency_exit import end_now
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from megatron_epp.mcore.loops.agreement import exchange
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
        rates_SK3: Coefficients of every stage's seconds (planner/calls/stage_seconds.py).
        seconds: Measurements of this rank's stage.
        token_bytes: Estimated bytes of a token's activations from forward to backward, for each
            stage; only the ratios between stages are meaningful.
        plans: Cached plans; all ranks of the replica request plans in one order.
        had_bytes: Largest estimate so far of the bytes that Megatron's order needs on a stage.
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
    plans: dict[object, Plan] = field(default_factory=dict)
    had_bytes: float = 0.0

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def current_op(self) -> CurrentOp:
        """Record of this rank's current op or phase, which the watcher reports."""
        return self.programs.current_op

    def options(self, call: LoopCall, wanted: CallOptions, tokens: Sequence[int]) -> CallOptions:
        """Return the options for planning ``call``, and update ``had_bytes``.

        All ranks of a replica compute equal options. In validation calls, plans do not reorder
        micro-batches.

        Args:
            call: The call.
            wanted: Options in the settings; the result allows no further changes.
            tokens: Number of tokens of each micro-batch.
        """
        if not call.forward_only and self.stages > 1:
            now = bytes_of_1f1b(tokens, self.stages, self.token_bytes)
            self.had_bytes = max(self.had_bytes, float(now.max()))
        if call.first_val_step is not None and call.forward_only:
            return CallOptions(False, False)
        return CallOptions(
            reorder=wanted.reorder and not any(p.replays(call.config) for p in LAYER_KINDS),
            split=wanted.split and self.split_refused is None,
            token_bytes=self.token_bytes,
            had_bytes=self.had_bytes if not call.forward_only else 0.0,
        )

    def plan(self, key: object, make: Callable[[], Plan]) -> Plan:
        """Return the cached plan for ``key``, or the plan that rank 0 makes and checks. Collective.

        The first call compiles the planner on one rank, which may take half a minute on a busy
        host. Therefore this method enters the planning phase, in which the watcher does not warn.

        Raises:
            LoopRefusal: ``make`` raised a ValueError, or the plan is invalid.
            LoopFailed: ``make`` raised another exception, which rank 0 raises.
        """

        def checked() -> Plan | None:
            if groups is not None and groups.control.rank():
                return None
            plan = make()
            check(plan)
            return plan

        groups = self.programs.groups
        self.current_op.enter(PLANNING)
        if key not in self.plans:
            plan, *_ = exchange(self.programs, PLANNING, checked)
            assert plan is not None, "rank 0 has made it"
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            self.plans[key] = plan
        return self.plans[key]


class Pipelines:
    """Cache of the pipelines of all called models.

    Models with the same Megatron pipeline group share the process groups of this package.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._known: WeakKeyDictionary[Any, ModelPipeline] = WeakKeyDictionary()
        self._programs: tuple[Any, ProgramRunner] | None = None
        self._initialised: InitialisedGroups | None = None

    def of(self, call: LoopCall, ranks: int) -> ModelPipeline:
        """Return the pipeline of the call's model; create the pipeline for a new model.

        Collective over the replica if the pipeline is new, and over the world if the process groups
        of the pipeline are new.

        Args:
            call: The call.
            ranks: Number of pipeline ranks.

        Raises:
            LoopRefusal: A rank cannot set up its stage; as do the others of :func:`exchange`.
        """
        group = None if ranks == 1 else mpu.get_pipeline_model_parallel_group()
        programs = None if group is None else self._programs_of(group, call.config)
        pipeline = self._known.get(call.one_model)
        if (
            pipeline is None
            or pipeline.group is not group
            or programs not in (None, pipeline.programs)
        ):
            programs = programs or ProgramRunner(this_device(), CurrentOp(0), catch_errors=True)
            pipeline = self._known[call.one_model] = self._make(call, group, ranks, programs)
        return pipeline

    def _make(
        self, call: LoopCall, group: Any, ranks: int, programs: ProgramRunner
    ) -> ModelPipeline:
        rank = 0 if programs.groups is None else programs.groups.pipeline_rank
        active = prod(part.active(call.config) for part in LAYER_KINDS)

        def own_stage() -> tuple[int, tuple[int, int], np.ndarray, str | None]:
            sizes = _layers_and_vocabulary(call.one_model)
            rates = guessed_rates(call.config, *sizes, active)
            return rank, sizes, rates, self._split_refused(call.one_model)

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
        device, communicators = this_device(), self._initialised
        programs = self._programs[1] if self._programs and self._programs[0] is group else None
        if programs is None:
            groups = make_replica_groups(device, self.settings.timeout)
            current_op = CurrentOp(groups.pipeline_rank)
            costs = one_queue(device)
            if costs is not None and dist.get_rank() == 0:
                logger.warning("%s", costs)
            watched = (current_op, groups.pipeline_ranks, dist.get_rank(), groups.timeout)
            Watcher(*watched, end=end_now).start()
            programs = ProgramRunner(device, current_op, groups, catch_errors=True)
            self._programs, communicators = (group, programs), None
        assert programs.groups is not None, "there are several stages"
        if communicators is None or communicators.anew:
            initialise_communicator(programs.groups, device, config)
            self._initialised = InitialisedGroups(
                [programs.groups.control, *programs.groups.payload.values()]
            )
        return programs

    def _split_refused(self, model: Any) -> str | None:
        """Return the reason why ``model`` cannot split backwards; None if it can."""
        if not self.settings.options.split:
            return "not wanted"
        if has_engines(model):
            return "the split backward of Transformer Engine's linears was timed in no loop"
        if kept := kept_in_input(model):
            return f"{' and '.join(kept)} fuse gradient accumulation"
        try:
            patch_points.install([patch_points.COLUMN_LINEAR, patch_points.ROW_LINEAR])
        except ValueError as refusal:
            return str(refusal)
        return None


def _layers_and_vocabulary(wrapped: Any) -> tuple[int, int]:
    """Return the number of layers and of vocabulary rows of a stage; 0 rows without LM head."""
    (model,) = unwrap_model([wrapped])
    sliced = attached(model)
    model = model if sliced is None else sliced.part
    decoder = getattr(model, "decoder", None)
    layers = len(getattr(decoder, "layers", ()) or ())
    return layers, getattr(model, "vocab_size", 0) if getattr(model, "post_process", False) else 0
