"""The schedule that takes the place of Megatron's: documents, a plan, its execution, gradients."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy
import torch
from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection
from megatron.core.utils import get_model_config
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_epp.control.cost_monitor import Truth
from megatron_epp.control.memory_budget import Budget
from megatron_epp.control.report import (
    IterationReport,
    Recorder,
    StageReport,
    gather_records,
    gather_report,
)
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.devices import GIB
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Plan, PlanError, Step, check, lower_stage, slices_of
from megatron_epp.layers.chunk_state import store_for
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore import telemetry
from megatron_epp.mcore.data.chunk_batches import Feed
from megatron_epp.mcore.data.global_batches import Batch, Documents
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.model.rng import random_states, restore_random_states
from megatron_epp.mcore.model.split_backward import early_modules, refuse_split
from megatron_epp.mcore.model.stage import ForwardStep, ModelStage, sum_reports
from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.consensus import agree
from megatron_epp.runtime.executor import Elsewhere, Executor, Failure, Waiting
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.malloc_trim import HostHeap
from megatron_epp.runtime.memory_meter import Meter

logger = logging.getLogger(__name__)

MIB = 2**20


class Planning(Protocol):
    """Where steps come from; every rank calls it, every rank gets the same step."""

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> Step: ...

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        """Training will ask for ``iteration`` with these lengths: begin with it."""

    @property
    def source(self) -> str:
        """Names the latest step where it is refused: the plan, or the file that holds it."""

    @property
    def budget(self) -> Budget | None:
        """What plans must stay within; None where they are given."""

    def narrow(self) -> None:
        """The budget has changed: plan with it from now on."""

    def shrink_evaluation(self, tokens: int) -> None:
        """Evaluate in chunks of at most ``tokens`` from now on."""

    @property
    def cost(self) -> Cost | None:
        """What ops are foretold by; None where plans are given."""

    def adopt(self, profile: Profile) -> None:
        """Plan with another cost model from now on."""


class ElasticSchedule:
    """Megatron's contract for a schedule: called once per iteration, or per evaluation step."""

    def __init__(
        self,
        groups: Groups,
        layers: tuple[int, ...],
        planning: Planning | None,  # comes later where it must be measured for
        share: RowShare,
        meter: Meter,
        waiting: Waiting,
        recorder: Recorder | None,
        device: torch.device,
        folders: Sequence[str] = (),
        loaded_from: str | None = None,
        validate: Callable[[torch.Tensor], None] | None = None,
        may_refit: bool = False,
        early_head: bool = False,
        keeps_last: bool = False,
    ):
        self.groups, self.layers, self.planning = groups, layers, planning
        self.share, self.meter, self.waiting = share, meter, waiting
        self.recorder, self.device = recorder, device
        # Where what is learnt about memory is kept, and where it was kept before a resume.
        self.folders, self.loaded_from = folders, loaded_from
        self.validate = validate  # shows Megatron's re-run machine the iteration's summed loss
        self.early_head, self.keeps_last = early_head, keeps_last
        self.truth = Truth(groups, folders, may_refit)
        self._resumed = False
        self._evaluation_tokens: float = math.inf  # of a chunk; memory ran out with more
        self.last_failure: Failure | None = None
        self.clock = CudaClock() if device.type == "cuda" else HostClock()
        self.heap = HostHeap() if device.type == "cpu" else None
        self.last_report: IterationReport | None = None
        self.last_step: Step | None = None
        self.planning_seconds = 0.0
        self.messages = 0

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """One iteration over the next global batch of documents.

        ``data_iterator`` gives :class:`Batch` after Batch, one per call; ``num_microbatches`` and
        the shapes are Megatron's counters and play no part. Returns, on the last stage, one
        report: each entry summed over the tokens of this replica.
        """
        if collect_non_loss_data:
            raise NotImplementedError("--epp collects no data other than the loss in evaluation")
        model = model[0] if isinstance(model, list) else model
        data_iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        config = get_model_config(model)
        if pg_collection is None:
            pg_collection = _build_default_pg_collection()
        batch: Batch = next(data_iterator)
        source = getattr(data_iterator, "iterable", data_iterator)
        iteration = self._iteration(forward_only)
        self.waiting.iteration = iteration

        if not self._resumed:
            self._resume(iteration)
        if config.timers is not None:
            timers = config.timers("forward-backward", log_level=1)
            timers.start(barrier=config.barrier_with_L1_time)
        random = random_states()
        while True:
            step = self._planned(iteration, batch, source, forward_only)
            plan = step.plans[self.groups.replica]
            samples = batch.samples[list(step.deals[self.groups.replica])]
            if any(other.splits_backward for other in step.plans):
                last = self.groups.stage == self.groups.stages - 1
                refuse_split(model, early_modules(model, self.early_head and last))
            stage = self._run(plan, samples, source.documents, model, config, forward_step_func)
            between = "gradients, optimizer and what else Megatron does between iterations"
            self.waiting.enter(Elsewhere(between))
            if not forward_only and config.finalize_model_grads_func is not None:
                tokens = torch.zeros([], dtype=torch.int, device=self.device) + stage.tokens
                config.finalize_model_grads_func(
                    [model],
                    tokens,
                    pg_collection=pg_collection,
                    force_all_reduce=force_all_reduce,
                )
            if forward_only:
                failures = self._gather().failures
            else:
                failures = self._report(iteration, step, source).failures
            if not failures:
                break
            if forward_only:
                self._evaluate_in_less(iteration, failures, step)
            else:
                self._start_over(iteration, failures, model)
            restore_random_states(random)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        reports = sum_reports(stage.reports)
        if not forward_only:
            self._count_flops(plan)
            if reports and self.validate is not None:
                self.validate(next(iter(reports[0].values()))[0])
        return reports

    def _planned(self, iteration: int, batch: Batch, source: Any, forward_only: bool) -> Step:
        self.waiting.enter("the plan that all ranks agree on")
        began = time.perf_counter()
        step = self._agreed_step(iteration, batch.lengths, forward_only)
        if not forward_only and (ahead := source.peek()) is not None:
            self.planning.look_ahead(iteration + 1, ahead.lengths)
        self.planning_seconds = time.perf_counter() - began
        return step

    # -------------------------------------------------------------- memory

    def _resume(self, iteration: int):
        """Plan with the budgets with which the run before the checkpoint would have planned on."""
        self._resumed = True
        profile = self.truth.resume(self.loaded_from, iteration)
        if profile is not None:
            self.planning.adopt(profile)
        budget = self.planning.budget
        if budget is not None and self.loaded_from:
            budget.load(self.loaded_from, iteration - 1)
            if budget.events:
                self._narrow()

    def _start_over(self, iteration: int, failures: Sequence[StageReport], model: Any):
        """A rank ran out of memory: nothing of this iteration counts, and plans get less room.

        All ranks know all failures, so all decide alike.
        """
        budget = self.planning.budget
        if budget is None:
            raise _no_other_plan(f"iteration {iteration}", failures[0])
        # One a stage: the rank that got furthest tells how much there is.
        worst: dict[int, StageReport] = {}
        for failure in failures:
            before = worst.setdefault(failure.stage, failure)
            if failure.held_bytes > before.held_bytes:
                worst[failure.stage] = failure
        for failure in worst.values():
            held = f"{failure.failure}, {failure.held_bytes / GIB:.4g} GiB held for chunks"
            event = budget.failed(iteration, failure.stage, failure.held_bytes, held)
            if self.groups.control.rank() == 0:
                logger.warning("the iteration is repeated with less memory: %s", event)
        self._narrow()
        for parameter in model.parameters():
            parameter.grad = None
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()

    def _evaluate_in_less(self, iteration: int, failures: Sequence[StageReport], step: Step):
        """An evaluation ran out of memory: it is repeated in smaller chunks. It keeps nothing from
        forward to backward, so what training may hold is not touched."""
        at = f"the evaluation after iteration {iteration}"
        if self.planning.budget is None:
            raise _no_other_plan(at, failures[0])
        failed = min(failures, key=lambda one: self._tokens(step, one))
        tokens = self._tokens(step, failed)
        if tokens == 1 or tokens > self._evaluation_tokens:
            raise PlanError(
                f"stage {failed.stage} ran out of memory at {failed.failure} of {at}, {tokens} "
                "tokens, and there are no smaller chunks: lower --epp-memory-budget-gib, use more "
                "devices or a shorter context"
            )
        if self.groups.control.rank() == 0:
            logger.warning(
                "%s is repeated in smaller chunks: stage %d ran out of memory at %s of %d tokens",
                at, failed.stage, failed.failure, tokens,
            )  # fmt: skip
        self._evaluation_tokens = tokens // 2
        self.planning.shrink_evaluation(self._evaluation_tokens)

    @staticmethod
    def _tokens(step: Step, failed: StageReport) -> int:
        return step.plans[failed.replica].chunks[failed.failure.chunk].tokens

    def _learn(self, iteration: int, step: Step, report: IterationReport):
        """Where a peak came near its budget and was promised lower, promise less from now on."""
        budget = self.planning.budget
        promises = [plan.predicted.peak_gib for plan in step.plans if plan.predicted is not None]
        if budget is None or not promises:
            return
        promised = [max(peaks) * GIB for peaks in zip(*promises, strict=True)]
        learnt = budget.measured(iteration, promised, report.peak_bytes)
        if self.groups.control.rank() == 0:
            for event in learnt:
                logger.warning("%s", event)
        if learnt:
            self._narrow()

    def _narrow(self):
        self.planning.narrow()
        if self.groups.control.rank() == 0:
            for folder in self.folders:
                self.planning.budget.save(folder)

    def _iteration(self, forward_only: bool) -> int:
        from megatron.training import get_args

        args = get_args()
        return (getattr(args, "curr_iteration", None) or args.iteration or 0) + 1

    def _agreed_step(self, iteration: int, lengths: numpy.ndarray, forward_only: bool) -> Step:
        """The step of this iteration, the same on all ranks, fit for these documents."""
        lengths = [int(length) for length in lengths]
        try:
            step = self.planning.step(iteration, lengths, forward_only)
            agree(f"{lengths}\n{step}", f"iteration {iteration}", self.groups.control)
        except RuntimeError as error:
            logger.error("%s; a rank is lost: %s", self.waiting, str(error).splitlines()[0])
            raise
        self._accept(step, lengths, forward_only)
        return step

    def _accept(self, step: Step, lengths: list[int], forward_only: bool):
        """Raise a PlanError unless this job can run ``step`` on these documents."""
        source = self.planning.source
        if len(step.plans) != self.groups.replicas:
            raise PlanError(
                f"{source} is for {len(step.plans)} data-parallel replicas; "
                f"this job has {self.groups.replicas}"
            )
        plan = step.plans[self.groups.replica]
        if plan.layers != self.layers:
            raise PlanError(
                f"{source} is for {_stages_text(plan.layers)}; "
                f"this job has {_stages_text(self.layers)}"
            )
        if step.lengths != tuple(lengths):
            odd = next(
                (d for d, pair in enumerate(zip(step.lengths, lengths, strict=False))
                 if pair[0] != pair[1]),
                None,
            )  # fmt: skip
            where = f"{len(step.lengths)} documents; the batch has {len(lengths)}"
            if odd is not None and len(step.lengths) == len(lengths):
                where = (
                    f"{step.lengths[odd]} inputs in document {odd}; the batch's document "
                    f"{odd} has {lengths[odd]}"
                )
            raise PlanError(
                f"{source} is for {where}: a plan runs only on documents of the lengths it "
                "was made for (leave --epp-plan out to plan each batch)"
            )
        if plan.forward_only != forward_only:
            kind = "evaluation" if plan.forward_only else "training"
            raise PlanError(f"{source} is for {kind} only")
        odd_letters = {x for stage in plan.recompute for c in stage for x in c} - set(EXECUTABLE)
        if odd_letters:
            raise PlanError(
                f"{source} has layers of choice {' '.join(sorted(odd_letters))} (o: offloaded), "
                "which only simulation can do; plan without the lever offload, or write one of "
                f"{' '.join(EXECUTABLE)} instead"
            )
        try:
            check(plan)
        except PlanError as error:
            raise PlanError(f"{source} cannot be run: {error}") from error

    def _run(
        self,
        plan: Plan,
        samples: numpy.ndarray,
        documents: Documents,
        model: Any,
        config: Any,
        forward_step: ForwardStep,
    ) -> ModelStage:
        stage = self.groups.stage
        slices = slices_of(plan)
        program = lower_stage(plan, stage)
        store = store_for(plan, slices, self.keeps_last)
        feed = Feed(plan, slices, samples, documents, stage, self.share, self.device)
        self.clock.start()
        links = Links(
            self.groups.payload,
            lambda chunk: (self.share.message(feed.rows(chunk)), 1, config.hidden_size),
            config.pipeline_dtype or config.params_dtype,
            self.device,
            self.groups.pipeline_ranks,
        )
        with ModelStage(model, config, forward_step, feed, plan, store, self.early_head) as compute:
            executor = Executor(
                program,
                compute,
                links,
                store,
                self.clock,
                self.meter,
                self.waiting,
                self.groups.peers,
                self.heap,
            )
            self.last_records = executor.run()
            self.last_failure = executor.failure
        self.messages = links.sent + links.received
        return compute

    def _count_flops(self, plan: Plan):
        """Whole documents of this replica, once per iteration on every rank: Megatron's log line
        then shows true tokens and TFLOP/s."""
        borders = numpy.concatenate(([0], numpy.cumsum(plan.documents)))
        update_seqlen_stats_from_cu_seqlens(torch.from_numpy(borders).to(self.device))

    def _gather(self, foretold: float = 0.0) -> IterationReport:
        """What became of the iteration on all ranks; ``foretold`` seconds for this one's ops."""
        groups = self.groups
        mine = StageReport.of(
            groups.replica, groups.stage, self.last_records, foretold, self.last_failure
        )
        return gather_report(mine, groups.leads, groups.control)

    def _report(self, iteration: int, step: Step, source: Any) -> IterationReport:
        groups, planning = self.groups, self.planning
        foretold = 0.0
        if planning.cost is not None and self.last_failure is None:
            plan = step.plans[groups.replica]
            foretold = self.truth.busy(planning.cost, plan, self.last_records)
        report = self._gather(foretold)
        if report.failures:
            return report
        self.last_report, self.last_step = report, step
        if self.recorder is not None:
            records = gather_records(
                groups.replica, self.last_records, groups.leads, groups.control
            )
            if groups.control.rank() == 0:
                self.recorder.write(iteration, step, records, planning.cost)
        told = self.truth.judge(step, report)
        if groups.control.rank() == 0:
            logger.info("%s", summary(iteration, step, report, self.planning_seconds))
            for warning in told:
                logger.warning("iteration %d: %s", iteration, warning)
        if telemetry.wanted():
            truncated = source.documents.counts.truncated
            values = telemetry.scalars(step, report, self.planning_seconds, truncated)
            telemetry.write(values, iteration)
        self._learn(iteration, step, report)
        if planning.cost is not None and planning.budget is not None:  # it plans as it goes
            profile = self.truth.refit(iteration, planning.cost)
            if profile is not None:
                planning.adopt(profile)
        return report


def _no_other_plan(at: str, failed: StageReport) -> PlanError:
    return PlanError(
        f"stage {failed.stage} ran out of memory at {failed.failure} of {at}, "
        f"{failed.held_bytes / GIB:.4g} GiB held: the plan was given (--epp-plan), so no other can "
        "be made; leave it out"
    )


def _stages_text(layers: Sequence[int]) -> str:
    return f"{len(layers)} stage{'s' * (len(layers) > 1)} of {' '.join(map(str, layers))} layers"


def summary(iteration: int, step: Step, report: IterationReport, planning_seconds: float) -> str:
    """One line on an iteration: what was foretold, what was measured."""
    chunks = sum(len(plan.chunks) for plan in step.plans)
    tokens = sum(plan.tokens for plan in step.plans)
    promises = [plan.predicted for plan in step.plans if plan.predicted is not None]
    seconds = f"{report.seconds:.3f} s"
    peaks = [f"{peak / MIB:.1f}" for peak in report.peak_bytes]
    if promises:
        foretold = max(promise.seconds for promise in promises)
        seconds += f", predicted {foretold:.3f} s ({report.seconds / foretold - 1:+.1%})"
        stages = zip(*(promise.peak_gib for promise in promises), strict=True)
        promised = [max(stage) * GIB / MIB for stage in stages]
        peaks = [f"{m} of {p:.1f}" for m, p in zip(peaks, promised, strict=True)]
    return " | ".join(
        [
            f"epp iteration {iteration}: {tokens} tokens in {chunks} chunks",
            seconds,
            f"{tokens / report.seconds:.0f} tokens/s",
            f"bubble {report.bubble_ratio:.1%}",
            f"peak {' '.join(peaks)} MiB",
            f"waited {planning_seconds * 1e3:.0f} ms for the plan",
        ]
    )
