"""Steps that rank 0 plans, one for every iteration, and all ranks receive as text."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_epp.control.fallbacks import Fallbacks
from megatron_epp.control.files import BestEffort
from megatron_epp.control.memory_budget import BUDGET_FILE, MemoryBudget
from megatron_epp.control.planner_process import PlannerFailed, PlannerProcess, PlannerRefused
from megatron_epp.control.step_source import SourcedStep
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import PlanError, Step
from megatron_epp.runtime.consensus import broadcast_text
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

FALLBACK = "packing"  # whole documents side by side: needs no search
_ROUNDING = 1e-9  # of a prediction in GiB


class PlannedSteps:
    """Steps planned by rank 0, whose text all ranks get; a refusal on rank 0 is one everywhere.

    With ``ahead`` a process of its own plans, asked one iteration early. When it fails, training
    goes on with the fallback planner for that iteration, which is logged and kept: ``fallbacks``
    (on rank 0) also names those of a run that is resumed. Plans stay within ``budget``, which is
    kept in ``folders``; whoever changes it calls :meth:`narrow`.
    """

    def __init__(
        self,
        cost: Cost,
        options: Any,
        planner: str,
        groups: Groups,
        ahead: bool,
        fallbacks: Fallbacks | None = None,
        folders: Sequence[str] = (),
    ):
        self.cost, self.options, self.planner, self.groups = cost, options, planner, groups
        self.fallbacks, self.folders = fallbacks or Fallbacks(()), tuple(folders)
        states = cost.layout.placement.of_ranks(cost.memory.states_bytes)
        self.budget = MemoryBudget(cost.device_budget_bytes, states, float(cost.layout.ep))
        self._ahead = ahead and groups.control.rank() == 0
        self.ahead: PlannerProcess | None = None
        self._evaluation_tokens: int | None = None
        self._try = BestEffort()
        self._start_ahead()

    def _start_ahead(self) -> None:
        if not self._ahead:
            return
        took = None
        if self.ahead is not None:
            took = self.ahead.iteration_seconds
            self.ahead.close()
        replicas = self.groups.replicas
        self.ahead = PlannerProcess(self.cost, self.options, self.planner, replicas)
        self.ahead.iteration_seconds = took

    def narrow(self) -> None:
        """Keep the budget as it is now and plan with it; what was planned ahead is forgotten."""
        profile = replace(self.cost.layout.profile, routing=self.budget.routing)
        cost = self.cost.replace(profile=profile)
        self.cost = cost.replace(device_budget_bytes=self.budget.planned_bytes)
        if self.groups.control.rank() == 0:
            for folder in self.folders:
                self._try(
                    f"what was learnt about memory, {folder}/{BUDGET_FILE},",
                    partial(self.budget.save, folder),
                )
        self._start_ahead()

    def shrink_evaluation(self, tokens: int) -> None:
        """Evaluate in chunks of at most ``tokens`` from now on. Not kept for a resumed run: the
        loss is the same, however it is computed."""
        self._evaluation_tokens = tokens

    def adopt(self, profile: Profile) -> None:
        """Plan with another cost model from now on."""
        profile = replace(profile, routing=self.budget.routing)
        self.cost = self.cost.replace(profile=profile)
        self._start_ahead()

    def took(self, seconds: float) -> None:
        """The last iteration's seconds, by which the planner process is judged to hang."""
        if self.ahead is not None:
            self.ahead.iteration_seconds = seconds

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        def plan() -> SourcedStep:
            sourced = self._plan(iteration, lengths, forward_only)
            self._require_fit(sourced.step)
            return sourced

        return shared(plan, self.groups.control)

    def _plan(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        planner, replicas = self.planner, self.groups.replicas
        if forward_only and self._evaluation_tokens is not None:
            from megatron_epp.planner import evaluation_step

            most = self._evaluation_tokens
            step = evaluation_step(lengths, self.cost, self.options, replicas, most)
            return SourcedStep(step, str(step))
        before = None if forward_only else self.fallbacks.of(iteration)
        if before is not None:
            planner = before
            logger.warning("iteration %d: planned by %s, as before the resume", iteration, planner)
        elif self.ahead is not None:
            try:
                return self._asked(self.ahead, iteration, lengths, forward_only)
            except PlannerFailed as failure:
                if not forward_only:
                    return self._stand_in(self.ahead, iteration, lengths, failure)
                # Evaluations are planned alike by everybody.
                logger.warning("an evaluation: the planner failed (%s)", failure)
        step = make_step(lengths, self.cost, self.options, planner, replicas, forward_only)
        return SourcedStep(step, str(step))

    def _asked(
        self, ahead: PlannerProcess, iteration: int, lengths: Sequence[int], forward_only: bool
    ) -> SourcedStep:
        """The planner process's step. PlannerFailed: it gave none; PlanError: there can be none."""
        name = _request_name(iteration, lengths, forward_only)
        try:
            ahead.ask(name, lengths, forward_only)
            text = ahead.reply(name)["step"]
        except PlannerRefused as refusal:
            raise PlanError(str(refusal)) from refusal
        return SourcedStep(Step.parse(text), text)

    def _stand_in(
        self,
        ahead: PlannerProcess,
        iteration: int,
        lengths: Sequence[int],
        failure: PlannerFailed,
    ) -> SourcedStep:
        """The fallback's step, which is kept; where that does not fit, the planner's after all."""
        message = f"iteration {iteration}: the planner failed ({failure})"
        try:
            step = make_step(
                lengths, self.cost, self.options, FALLBACK, self.groups.replicas, False
            )
            self._require_fit(step)
        except ValueError as excess:
            logger.warning("%s, and %s does not fit; asking once more", message, FALLBACK)
            try:
                return self._asked(ahead, iteration, lengths, False)
            except PlannerFailed as again:
                raise PlanError(
                    f"{message}, and again ({again}); by {FALLBACK}: {excess}"
                ) from again
        logger.warning("%s; using %s", message, FALLBACK)
        self.fallbacks.add(iteration, FALLBACK, str(failure))
        return SourcedStep(step, str(step))

    def _require_fit(self, step: Step) -> None:
        """Raise a PlanError where a rank's predicted peak is above the budget of its device."""
        for plan in step.plans:
            if plan.predicted is None:
                continue
            for rank, (peak, budget) in enumerate(
                zip(plan.predicted.peak_gib, self.cost.device_budget_bytes, strict=True)
            ):
                if peak * GIB > budget * (1 + _ROUNDING):
                    longest = max(plan.documents)
                    raise PlanError(
                        f"pipeline rank {rank} needs {peak:.4g} GiB in the best plan found "
                        f"({plan.predicted.planner}) for documents of up to {longest} tokens; the "
                        f"budget is {budget / GIB:.4g} GiB{self._why_less(rank)}: raise "
                        "--epp-memory-budget-gib, use more pipeline ranks, or a shorter "
                        "--seq-length"
                    )

    def _why_less(self, rank: int) -> str:
        correction, held = self.budget.corrections[rank], self.budget.device_bytes[rank]
        if correction == 1:
            return ""
        return f" ({held / GIB:.4g} GiB, as chunks hold {correction:.3g} times what is predicted)"

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        if self.ahead is not None:
            self.ahead.ask(_request_name(iteration, lengths, False), lengths, False)


def shared(plan: Callable[[], SourcedStep], group: dist.ProcessGroup) -> SourcedStep:
    """The step that rank 0 of ``group`` plans, on every rank; its refusal is everybody's.

    Collective. The text is printed once, by who made the step, and parsed once on every rank.
    """
    sourced, text, error = None, None, None
    if group.rank() == 0:
        try:
            sourced = plan()
            text = sourced.text
        except ValueError as refusal:
            error = str(refusal)
    text = broadcast_text(text, error, group)
    return SourcedStep(Step.parse(text), text) if sourced is None else sourced


def _request_name(iteration: int, lengths: Sequence[int], forward_only: bool) -> str:
    """Names what a plan depends on, so that a reply is never used for another batch."""
    digest = hashlib.sha256(repr(list(map(int, lengths))).encode()).hexdigest()[:16]
    return f"{'evaluation' if forward_only else 'iteration'} {iteration} {digest}"


def make_step(
    lengths: Sequence[int],
    cost: Cost,
    options: Any,
    planner: str,
    replicas: int,
    forward_only: bool,
) -> Step:
    """The step that ``planner`` makes, or for ``forward_only`` one of forwards alone."""
    # Imported where plans are made, on rank 0: solver and compiler take seconds to load.
    from megatron_epp.planner import evaluation_step, plan_step

    if forward_only:
        return evaluation_step(lengths, cost, options, replicas)
    return plan_step(lengths, cost, options, planner, replicas).step
