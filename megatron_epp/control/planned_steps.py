"""Steps planned during training: one rank plans for each replica, or for each lockstep group."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_epp.control.files import BestEffort
from megatron_epp.control.memory_budget import BUDGET_FILE, MemoryBudget
from megatron_epp.control.planner_pool import PlannerPool
from megatron_epp.control.planner_process import PlannerFailed, PlannerProcess, PlannerRefused
from megatron_epp.control.step_source import Following, Planning, SourcedStep, planned_documents
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import PlanError, StepPart
from megatron_epp.runtime.consensus import broadcast_result
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

FALLBACK = "packing"  # packs whole documents; needs no search
_ROUNDING = 1e-9  # relative rounding error of a prediction in GiB


class PlannedSteps:
    """Source of steps: in each replica, one rank makes the plan and broadcasts it to the others.

    The assignment of documents to replicas follows from the lengths and the cost model, so it is
    equal on all hosts. Replicas in lockstep are planned together, by one rank. If a planner process
    fails, the fallback planner plans that iteration for the same replicas, and a warning is logged.
    For an evaluation, this process runs ``planner`` itself instead.

    Args:
        cost: cost model of the job.
        options: options of the planners.
        planner: name of the planner.
        groups: process groups of the job.
        processes: maximum number of planner processes on this rank, each of which plans a different
            iteration; 0 plans in this process.
        folders: folders in which the memory budget is saved.

    Attributes:
        budget: memory budget of the plans; call :meth:`narrow` after changing it.
    """

    def __init__(
        self,
        cost: Cost,
        options: Any,
        planner: str,
        groups: Groups,
        processes: int,
        folders: Sequence[str] = (),
    ):
        self.cost, self.options, self.planner, self.groups = cost, options, planner, groups
        self.folders = tuple(folders)
        states, ep = cost.states_of_ranks, float(cost.layout.ep)
        self.budget = MemoryBudget(cost.device_budget_bytes, states, ep)
        self._evaluation_tokens: int | None = None
        self._try = BestEffort()
        self._reported = 0
        self.pool: PlannerPool | None = None
        if processes and groups.plans:
            self.pool = PlannerPool(self._process, processes)

    @property
    def _first(self) -> int:
        """First replica of the lockstep group, whose replicas are planned together."""
        return self.groups.replica - self.groups.replica % self.options.lockstep

    def _process(self) -> PlannerProcess:
        replicas = self.groups.replicas
        return PlannerProcess(self.cost, self.options, self.planner, replicas, self._first)

    def _start_anew(self) -> None:
        if self.pool is not None:
            self.pool.restart()

    def narrow(self) -> None:
        """Save the budget, discard plans made ahead, and plan later iterations with the budget."""
        profile = replace(self.cost.layout.profile, routing=self.budget.routing)
        cost = self.cost.replace(profile=profile)
        self.cost = cost.replace(device_budget_bytes=self.budget.planned_bytes)
        if self.groups.control.rank() == 0:
            for folder in self.folders:
                self._try(
                    f"what was learnt about memory, {folder}/{BUDGET_FILE},",
                    partial(self.budget.save, folder),
                )
        self._start_anew()

    def shrink_evaluation(self, tokens: int) -> None:
        """Limit the chunks of later evaluations to ``tokens`` tokens.

        The limit is not saved for a resumed run, because the loss does not depend on the chunks.
        """
        self._evaluation_tokens = tokens

    def adopt(self, profile: Profile) -> None:
        """Discard plans made ahead, and plan later iterations with the cost model ``profile``."""
        profile = replace(profile, routing=self.budget.routing)
        self.cost = self.cost.replace(profile=profile)
        self._start_anew()

    def took(self, seconds: float) -> None:
        """Set the duration of the last iteration, from which planner time-outs are derived."""
        if self.pool is not None:
            self.pool.took(seconds)

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        """Plan on one rank of this lockstep group; return the plans on all ranks of the group.

        All ranks of the lockstep group must call this method. Without lockstep, this group is a
        replica.

        Args:
            iteration: number of the iteration.
            lengths: tokens of each document of the global batch.
            forward_only: whether the step is an evaluation.

        Raises:
            PlanError: the documents cannot be planned, or no plan fits the memory budget. All ranks
                of the group raise this error.
        """
        planning = Planning()
        planned_here: StepPart | None = None

        def plan() -> str:
            nonlocal planning, planned_here
            began = time.perf_counter()
            planned_here, text = self._plan(iteration, lengths, forward_only)
            self._require_fit(planned_here)
            planning = self._planning(time.perf_counter() - began)
            return text

        text = broadcast_result(plan, self.groups.planned_together, self.groups.planner)
        return SourcedStep(planned_here or StepPart.parse(text), text, planning=planning)

    def _planning(self, waited_seconds: float) -> Planning:
        pool, reported = self.pool, self._reported
        if pool is None:
            return Planning(waited_seconds)
        self._reported = pool.discarded
        return Planning(waited_seconds, pool.ahead, pool.discarded - reported)

    def _plan(
        self, iteration: int, lengths: Sequence[int], forward_only: bool
    ) -> tuple[StepPart, str]:
        """Plan the part of this lockstep group; return it and its text. One rank calls this."""
        if forward_only and self._evaluation_tokens is not None:
            return self._planned_here(lengths, self.planner, True)
        if self.pool is not None:
            try:
                return self._asked(self.pool, iteration, lengths, forward_only)
            except PlannerFailed as failure:
                if not forward_only:
                    return self._stand_in(self.pool, iteration, lengths, failure)
                logger.warning("an evaluation: the planner failed (%s)", failure)
        return self._planned_here(lengths, self.planner, forward_only)

    def _at(self, iteration: int) -> str:
        together = self.groups.replicas == self.options.lockstep
        return f"iteration {iteration}" + ("" if together else f", replica {self._first}")

    def _planned_here(
        self, lengths: Sequence[int], planner: str, forward_only: bool
    ) -> tuple[StepPart, str]:
        """Plan in this process instead of a planner process."""
        # Imported only where plans are made: solver and compiler take seconds to load.
        from megatron_epp.planner.replicas import evaluation_part, plan_part

        place = self.groups.replicas, self._first
        if forward_only:
            most = self._evaluation_tokens
            part = evaluation_part(lengths, self.cost, self.options, *place, most)
        else:
            documents = planned_documents(lengths)
            part = plan_part(documents, self.cost, self.options, planner, *place, self.planner)
        return part, str(part)

    def _asked(
        self, pool: PlannerPool, iteration: int, lengths: Sequence[int], forward_only: bool
    ) -> tuple[StepPart, str]:
        """Return the part of a step that a planner process has planned, and the part's text.

        Raises:
            PlannerFailed: the process did not answer.
            PlanError: the planner refused the documents, or no plan fits.
        """
        try:
            documents = lengths if forward_only else planned_documents(lengths)
            text = pool.reply(iteration, documents, forward_only).step
        except PlannerRefused as refusal:
            raise PlanError(str(refusal)) from refusal
        return StepPart.parse(text), text

    def _stand_in(
        self, pool: PlannerPool, iteration: int, lengths: Sequence[int], failure: PlannerFailed
    ) -> tuple[StepPart, str]:
        """Use the fallback planner; if its plan does not fit, ask the planner again."""
        message = f"{self._at(iteration)}: the planner failed ({failure})"
        try:
            part, text = self._planned_here(lengths, FALLBACK, False)
            self._require_fit(part)
        except ValueError as excess:
            logger.warning("%s, and %s does not fit; asking once more", message, FALLBACK)
            try:
                return self._asked(pool, iteration, lengths, False)
            except PlannerFailed as again:
                raise PlanError(
                    f"{message}, and again ({again}); by {FALLBACK}: {excess}"
                ) from again
        logger.warning("%s; using %s", message, FALLBACK)
        return part, text

    def _require_fit(self, step: StepPart) -> None:
        """Raise a PlanError if a rank's predicted peak exceeds the memory budget of that rank."""
        for plan in step.plans:
            if plan.predicted is None:
                continue
            for rank, (peak, budget) in enumerate(
                zip(plan.predicted.peak_gib, self.cost.device_budget_bytes, strict=True)
            ):
                if peak * GIB > budget * (1 + _ROUNDING):
                    ends = (plan.offset(d) + n for d, n in enumerate(plan.documents))
                    longest = max(ends, default=0)
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

    def look_ahead(self, iteration: int, following: Following) -> None:
        """Request plans of the :attr:`PlannerPool.ahead` iterations after ``iteration``."""
        if self.pool is None:
            return
        for later in range(1, self.pool.ahead + 1):
            lengths = following(later)
            if lengths is None:
                return
            try:
                documents = planned_documents(lengths)
            except ValueError:  # the iteration itself raises it, on all ranks
                return
            self.pool.ask(iteration + later, documents)
