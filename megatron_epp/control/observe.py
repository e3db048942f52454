"""An iteration observed: logged, recorded, drawn, compared with its prediction, learnt from."""

import json
import logging
from collections.abc import Callable, Sequence

from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.control.files import BestEffort
from megatron_epp.control.report import (
    IterationReport,
    RankReport,
    Recorder,
    gather_records,
    gather_report,
)
from megatron_epp.control.retry import Attempt
from megatron_epp.control.routed_memory import routed_bytes
from megatron_epp.control.step_source import AdaptiveSource, PredictingSource, StepSource
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Step, Timed
from megatron_epp.runtime.consensus import broadcast_result
from megatron_epp.runtime.executor import Failure
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

MIB = 2**20

# One line on an iteration, for the log: its number, step, report, seconds waited for the plan.
Summary = Callable[[int, Step, IterationReport, float], str]
# Draws the same where the user looks (mcore/trainer/telemetry.py).
Telemetry = Callable[[int, Step, IterationReport, float], None]


class Observer:
    """Follows the iterations of a job. What it keeps is never worth the training itself.

    loaded_from   the folder of the run that is resumed, which has learnt before
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
        self._try = BestEffort()

    def resume(self, iteration: int) -> None:
        """Once, before the first iteration: plan as the run before the checkpoint would have
        planned on, with its budgets and its cost model."""
        if self._resumed:
            return
        self._resumed = True
        if not isinstance(self.steps, AdaptiveSource):
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
        step: Step,
        records: tuple[Timed, ...],
        failure: Failure | None,
        host_bytes: int = 0,
    ) -> IterationReport:
        """Reports of ``step`` from all ranks, given this rank's ``records`` of it and the most that
        it held in its host's memory. Collective."""
        groups, predicted = self.groups, 0.0
        plan = step.plans[groups.replica]
        if isinstance(self.steps, PredictingSource) and failure is None and not plan.forward_only:
            block = step.block(groups.replica)
            predicted = self.monitor.busy(self.steps.cost, plan, records, block)
        place = groups.replica, groups.pipeline_rank
        own_report = RankReport.of(*place, records, predicted, failure, host_bytes)
        return gather_report(own_report, groups.leads, groups.control)

    def after(self, iteration: int, done: Attempt, waited_seconds: float) -> None:
        """A training iteration is through. Collective."""
        self._record(iteration, done)
        step, report = done.step, done.report
        warnings = self.monitor.check_drift(step, report)
        if self.groups.control.rank() == 0:
            logger.info("%s", self.summary(iteration, step, report, waited_seconds))
            for warning in warnings:
                logger.warning("iteration %d: %s", iteration, warning)
        self._try(
            "what TensorBoard and Weights & Biases draw of elastic pipelines",
            lambda: self.telemetry(iteration, step, report, waited_seconds),
        )
        if isinstance(self.steps, AdaptiveSource):
            self.steps.took(report.seconds)
            self._learn(iteration, self.steps, step, report)
            profile = self.monitor.refit(iteration, self.steps.cost)
            if profile is not None:
                self.steps.adopt(profile)

    def _record(self, iteration: int, done: Attempt) -> None:
        groups, recorder = self.groups, self.recorder
        if recorder is None:
            return
        records = gather_records(groups.replica, done.records, groups.leads, groups.control)
        if groups.control.rank() == 0:
            cost = self.steps.cost if isinstance(self.steps, PredictingSource) else None
            self._try(
                f"the records of --epp-record {recorder.folder}",
                lambda: recorder.write(iteration, done.step, records, cost),
            )

    def _learn(
        self, iteration: int, steps: AdaptiveSource, step: Step, report: IterationReport
    ) -> None:
        """Where a peak came near its budget and was predicted lower, plan with less from now on."""
        predicted = predicted_peak_bytes(step)
        if not predicted:
            return
        learnt = steps.budget.measured(
            iteration, predicted, report.peak_bytes, lambda: self._routed(steps.cost, step)
        )
        if self.groups.control.rank() == 0:
            for event in learnt:
                logger.warning("%s", event)
        if learnt:
            steps.narrow()

    def _routed(self, cost: Cost, step: Step) -> list[float]:
        """The part of each rank's peak that routing decides, from rank 0, which simulates plans.
        Collective: peaks and predictions, by which it is asked for, are the same on all ranks."""
        group = self.groups.control
        return json.loads(broadcast_result(lambda: json.dumps(routed_bytes(cost, step)), group))


def predicted_peak_bytes(step: Step) -> Sequence[float]:
    """The worst replica's peak of every pipeline rank; empty where plans predict nothing."""
    predictions = [plan.predicted.peak_gib for plan in step.plans if plan.predicted is not None]
    return [max(peaks) * GIB for peaks in zip(*predictions, strict=True)]


def summary_line(iteration: int, step: Step, report: IterationReport, waited_seconds: float) -> str:
    """One line on an iteration: what was predicted, what was measured."""
    chunks = sum(len(plan.chunks) for plan in step.plans)
    tokens = sum(plan.tokens for plan in step.plans)
    predictions = [plan.predicted for plan in step.plans if plan.predicted is not None]
    seconds = f"{report.seconds:.3f} s"
    peaks = [f"{peak / MIB:.1f}" for peak in report.peak_bytes]
    hosts = [f"{peak / MIB:.1f}" for peak in report.host_bytes]
    if predictions:
        predicted = max(prediction.seconds for prediction in predictions)
        seconds += f", predicted {predicted:.3f} s ({report.seconds / predicted - 1:+.1%})"
        pairs = zip(peaks, predicted_peak_bytes(step), strict=True)
        peaks = [f"{measured} of {predicted / MIB:.1f}" for measured, predicted in pairs]
    return " | ".join(
        [
            f"epp iteration {iteration}: {tokens} tokens in {chunks} chunks",
            seconds,
            f"{tokens / report.seconds:.0f} tokens/s",
            f"bubble {report.bubble_ratio:.1%}",
            f"peak {' '.join(peaks)} MiB",
            *([f"on the host {' '.join(hosts)} MiB"] if any(report.host_bytes) else []),
            f"waited {waited_seconds * 1e3:.0f} ms for the plan",
        ]
    )
