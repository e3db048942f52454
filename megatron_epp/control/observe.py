"""Observation of iterations: log, records, and updates of memory budgets and cost model."""

import dataclasses
import logging
from collections.abc import Callable

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.control.files import BestEffort
from megatron_epp.control.planned_steps import PlannedSteps
from megatron_epp.control.report import (
    IterationReport,
    RankReport,
    Recorder,
    gather_records,
    gather_report,
)
from megatron_epp.control.retry import Attempt
from megatron_epp.control.routed_memory import routed_bytes
from megatron_epp.control.step_source import PredictingSource, StepSource
from megatron_epp.control.waits import Waits
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Timed
from megatron_epp.runtime.consensus import largest
from megatron_epp.runtime.executor import Failure
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

MIB = 2**20
SHORT_SECONDS = 1.0  # shorter waits for the first plan are not logged

# Function from an iteration's number, step, report and seconds of waiting for the plan, to its log
# line.
Summary = Callable[[int, AcceptedStep, IterationReport, float], str]
# Function that writes an iteration to TensorBoard or Weights & Biases (mcore/trainer/job.py).
Telemetry = Callable[[int, AcceptedStep, IterationReport], None]


class Observer:
    """Observer of a job's iterations; a failure to record an iteration never ends training.

    Args:
        groups: process groups of the job.
        steps: source of the steps.
        monitor: monitor that compares predicted with measured seconds.
        recorder: writer of the files of ``--epp-record``; None without this flag.
        summary: function that formats the log line.
        telemetry: function that writes scalars to TensorBoard or Weights & Biases.
        loaded_from: folder of the resumed run, with its memory budgets and cost models; None if no
            run is resumed.
    """

    def __init__(
        self,
        groups: Groups,
        steps: StepSource,
        monitor: CostMonitor,
        recorder: Recorder | None,
        summary: Summary,
        telemetry: Telemetry,
        loaded_from: str | None = None,
    ):
        self.groups, self.steps, self.monitor = groups, steps, monitor
        self.recorder, self.summary, self.telemetry = recorder, summary, telemetry
        self.loaded_from = loaded_from
        self._resumed = False
        self._waits = Waits()
        self._try = BestEffort()

    def resume(self, iteration: int) -> None:
        """Restore the memory budgets and the cost model of a resumed run, in the first call.

        All ranks of the job must make the first call; later calls do nothing.

        Raises:
            ValueError: a file of the resumed run cannot be parsed.
            OSError: the file of memory budgets cannot be read.
        """
        if self._resumed:
            return
        self._resumed = True
        if not isinstance(self.steps, PlannedSteps):
            return
        profile = self.monitor.resume(self.loaded_from, iteration)
        if profile is not None:
            self.steps.adopt(profile)
        if self.loaded_from:
            self.steps.budget.load(self.loaded_from, iteration - 1)
            if self.steps.budget.events:
                self.steps.narrow()

    def gather(
        self,
        step: AcceptedStep,
        records: tuple[Timed, ...],
        failure: Failure | None,
        host_bytes: int = 0,
    ) -> IterationReport:
        """Summarise this rank's records of ``step``, and return the reports of all ranks.

        All ranks of the job must call this method. In training with a cost model, the ops are saved
        as samples for a refit.

        Args:
            step: step that this rank ran.
            records: timed ops and transfers of this rank.
            failure: op at which this rank ran out of memory; None if it did not.
            host_bytes: peak of this rank's offloaded bytes in host memory.
        """
        groups, predicted = self.groups, 0.0
        plan, block = step.plan_of(groups.replica), step.plans
        if isinstance(self.steps, PredictingSource) and failure is None and not plan.forward_only:
            predicted = self.monitor.busy(self.steps.cost, plan, records, block)
        place = groups.replica, groups.pipeline_rank
        own_report = RankReport.of(*place, records, predicted, failure, host_bytes, block)
        return gather_report(own_report, groups.leads, groups.control)

    def after(self, iteration: int, done: Attempt, header: Callable[[], str]) -> None:
        """Log and record a finished training iteration, and update memory budgets and cost model.

        All ranks of the job must call this method.

        Args:
            iteration: number of the iteration.
            done: results of the iteration.
            header: function that returns the comment lines before the recorded step.
        """
        self._record(iteration, done, header)
        step, report = done.step, done.report
        waited = step.planning.waited_seconds
        warnings = self.monitor.check_drift(step.predicted_seconds, report)
        warnings += self._waits.see(step.planning, report.seconds)
        if self.groups.control.rank() == 0:
            shown = dataclasses.replace(step, predicted_peak_bytes=self._of_chunks(step))
            logger.info("%s", self.summary(iteration, shown, report, waited))
            if self._waits.seen == 1 and waited > SHORT_SECONDS:
                logger.info(
                    "iteration %d: %.1f s of waiting for the first plan, for which nothing can be "
                    "ahead; it is not counted among later waits", iteration, waited
                )  # fmt: skip
            for warning in warnings:
                logger.warning("iteration %d: %s", iteration, warning)
        self._try(
            "what TensorBoard and Weights & Biases draw of elastic pipelines",
            lambda: self.telemetry(iteration, step, report),
        )
        if isinstance(self.steps, PlannedSteps):
            self.steps.took(report.seconds)
            self._learn(iteration, self.steps, step, report)
            profile = self.monitor.refit(iteration, self.steps.cost)
            if profile is not None:
                self.steps.adopt(profile)

    def _record(self, iteration: int, done: Attempt, header: Callable[[], str]) -> None:
        groups, recorder = self.groups, self.recorder
        if recorder is None:
            return
        gathered = gather_records(done.step.part, done.records, groups)
        if gathered is not None:
            cost = self.steps.cost if isinstance(self.steps, PredictingSource) else None
            self._try(
                f"the records of --epp-record {recorder.folder}",
                lambda: recorder.write(iteration, *gathered, cost, done.step.planning, header()),
            )

    def _of_chunks(self, step: AcceptedStep) -> tuple[float, ...]:
        """Return the predicted peaks without model states, which measured peaks do not include."""
        predicted = step.predicted_peak_bytes
        if not (predicted and isinstance(self.steps, PredictingSource)):
            return predicted
        states = self.steps.cost.states_of_ranks
        return tuple(peak - held for peak, held in zip(predicted, states, strict=True))

    def _learn(
        self, iteration: int, steps: PlannedSteps, step: AcceptedStep, report: IterationReport
    ) -> None:
        """Reduce the memory of later plans if a measured peak exceeded its prediction."""
        if not step.predicted_peak_bytes:
            return
        learnt = steps.budget.measured(
            iteration,
            step.predicted_peak_bytes,
            report.peak_bytes,
            lambda: self._routed(steps.cost, step),
        )
        if self.groups.control.rank() == 0:
            for event in learnt:
                logger.warning("%s", event)
        if learnt:
            steps.narrow()

    def _routed(self, cost: Cost, step: AcceptedStep) -> list[float]:
        """Return the growth of each rank's peak bytes if the routing factor grows by 1.

        Only ranks that plan compute the bytes. All ranks call this method in the same iterations,
        because they all compare the same peaks with the same predictions.
        """
        groups = self.groups
        own = routed_bytes(cost, step.plans) if groups.plans else [0.0] * groups.pipeline_size
        return largest(own, groups.control)


def summary_line(
    iteration: int, step: AcceptedStep, report: IterationReport, waited_seconds: float
) -> str:
    """Return the log line of an iteration: predicted and measured seconds, peaks and waits.

    Args:
        iteration: number of the iteration.
        step: step of the iteration; its predicted peaks must not include the model states.
        report: measurements of the iteration.
        waited_seconds: time that training waited for the plan.
    """
    predicted, planning = step.predicted_seconds, step.planning
    seconds = f"{report.seconds:.3f} s"
    peaks = [f"{peak / MIB:.1f}" for peak in report.peak_bytes]
    hosts = [f"{peak / MIB:.1f}" for peak in report.host_bytes]
    if predicted:
        seconds += f", predicted {predicted:.3f} s ({report.seconds / predicted - 1:+.1%})"
        pairs = zip(peaks, step.predicted_peak_bytes, strict=True)
        peaks = [f"{measured} of {expected / MIB:.1f}" for measured, expected in pairs]
    return " | ".join(
        [
            f"epp iteration {iteration}: {step.tokens} tokens in {report.chunks} chunks",
            seconds,
            f"{step.tokens / report.seconds:.0f} tokens/s",
            f"bubble {report.bubble_ratio:.1%}",
            f"peak {' '.join(peaks)} MiB",
            *([f"on the host {' '.join(hosts)} MiB"] if any(report.host_bytes) else []),
            f"waited {waited_seconds * 1e3:.0f} ms for the plan",
            *([f"planned {planning.ahead} ahead"] if planning.ahead else []),
            *([f"{planning.discarded} plans discarded"] if planning.discarded else []),
        ]
    )
