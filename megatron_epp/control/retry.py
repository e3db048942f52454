"""Repetition of an iteration that ran out of memory, with a new plan that needs less memory.

All ranks know the failures of all ranks, so all ranks make the same decision.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.control.planned_steps import PlannedSteps
from megatron_epp.control.report import IterationReport, RankReport
from megatron_epp.control.step_source import StepSource
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import PlanError, Timed
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

# Each repetition cuts more than the one before (memory_budget.cut). After the last one less than a
# fiftieth of the headroom is left, so the plans are not the cause.
MOST_REPETITIONS = 8


@dataclass(frozen=True, slots=True)
class Attempt:
    """Results of one run of an iteration: step, this rank's records, reports of all ranks."""

    step: AcceptedStep
    records: tuple[Timed, ...]
    report: IterationReport


class Retry:
    """Runner that repeats iterations that run out of memory, with plans that need less memory.

    Iterations are repeated only if the source plans again (PlannedSteps). With other sources, a
    failure raises a PlanError.
    """

    def __init__(self, steps: StepSource, groups: Groups):
        self.steps, self.groups = steps, groups
        self._evaluation_tokens: float = math.inf  # limit of a chunk that all evaluations keep

    def run(
        self,
        iteration: int,
        forward_only: bool,
        attempt: Callable[[], Attempt],
        undo: Callable[[], None],
    ) -> Attempt:
        """Run ``attempt`` until no rank runs out of memory, and return its result.

        All ranks of the job must call this method. After a failed attempt in training, the memory
        budgets of the failed ranks are lowered. After a failed evaluation, the chunks of
        evaluations become smaller. Rank 0 logs the change, and ``undo`` runs.

        Args:
            iteration: number of the iteration.
            forward_only: whether the iteration is an evaluation.
            attempt: function that runs the iteration.
            undo: function that discards the results of a failed attempt.

        Raises:
            PlanError: memory does not suffice and no other plan can be made.
        """
        for tried in count(1):
            done = attempt()
            failures = done.report.failures
            if not failures:
                return done
            if forward_only:
                self._evaluate_in_less(iteration, failures)
            else:
                self._plan_with_less(iteration, failures, tried)
            undo()
        raise AssertionError("an attempt either succeeds or ends the job")

    def _plan_with_less(self, iteration: int, failures: Sequence[RankReport], tried: int) -> None:
        """Lower the memory budgets of the ranks that failed."""
        at = f"iteration {iteration}"
        if not isinstance(self.steps, PlannedSteps):
            raise _no_other_plan(at, failures[0])
        # One failure per pipeline rank: the device that held most shows how much memory there is.
        worst: dict[int, RankReport] = {}
        for failure in failures:
            before = worst.setdefault(failure.rank, failure)
            if failure.held_bytes > before.held_bytes:
                worst[failure.rank] = failure
        if tried > MOST_REPETITIONS:
            failure = failures[0]
            raise PlanError(
                f"{at}: out of memory in all of {tried} attempts, each planned with less than the "
                f"one before; the last at {failure.failed_op} on pipeline rank {failure.rank} with "
                f"{failure.held_bytes / GIB:.4g} GiB held for chunks: use more devices, a shorter "
                "--seq-length or a smaller model, or see what else is in the device's memory"
            )
        for failure in worst.values():
            held = f"{failure.failed_op}, {failure.held_bytes} bytes held for chunks"
            event = self.steps.budget.failed(
                iteration, failure.rank, failure.held_bytes, held, tried
            )
            if self.groups.control.rank() == 0:
                logger.warning("the iteration is repeated with less memory: %s", event)
        self.steps.narrow()

    def _evaluate_in_less(self, iteration: int, failures: Sequence[RankReport]) -> None:
        """Limit chunks of evaluations to half of the smallest chunk that failed, in tokens.

        Evaluations save nothing for a backward, so the memory budget of training does not change.
        """
        at = f"the evaluation after iteration {iteration}"
        if not isinstance(self.steps, PlannedSteps):
            raise _no_other_plan(at, failures[0])
        failed = min(failures, key=lambda one: one.failed_tokens)
        tokens = failed.failed_tokens
        if tokens == 1 or tokens > self._evaluation_tokens:
            raise PlanError(
                f"pipeline rank {failed.rank} ran out of memory at {failed.failed_op} in {at}, "
                f"{tokens} tokens, and there are no smaller chunks: lower --epp-memory-budget-gib, "
                "use more devices or a shorter context"
            )
        if self.groups.control.rank() == 0:
            logger.warning(
                "%s is repeated in smaller chunks: pipeline rank %d ran out of memory at %s, "
                "%d tokens",
                at, failed.rank, failed.failed_op, tokens,
            )  # fmt: skip
        self._evaluation_tokens = tokens // 2
        self.steps.shrink_evaluation(tokens // 2)


def _no_other_plan(at: str, failed: RankReport) -> PlanError:
    return PlanError(
        f"pipeline rank {failed.rank} ran out of memory at {failed.failed_op} in {at}, "
        f"{failed.held_bytes / GIB:.4g} GiB held: the plan was given (--epp-plan), so no other can "
        "be made; leave it out"
    )
