"""Agreement of all ranks on a step that fits this job and the documents of a batch."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_epp.control.step_source import (
    Following,
    Planning,
    SharingLengths,
    SourcedStep,
    StepSource,
)
from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import Plan, PlanError, Step, StepPart, check, check_op_templates, check_ranks
from megatron_epp.runtime.consensus import (
    DIGEST_NUMBERS,
    broadcast_text,
    digest,
    digest_bounds,
    largest,
    require_same,
    same_digests,
)
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

# Verdict of a rank on its step: valid, not runnable by this job, or missing.
_FINE, _REFUSED, _MISSING = 0, 1, 2
_ONE_PLAN = (
    "the same plan everywhere (same --epp-plan file, same lengths, same flags on every node)"
)
_RANKS = 2**32  # more ranks than any job has: one number encodes a verdict and a rank


@dataclass(frozen=True, slots=True)
class AcceptedStep:
    """This rank's part of a step, with facts about the full step that all ranks know.

    Attributes:
        part: plans of this rank's lockstep group, or of its replica alone.
        tokens: number of tokens in the global batch.
        predicted_seconds: predicted time of the slowest replica; 0 if plans have no prediction.
        predicted_peak_bytes: predicted peak of each pipeline rank, as the maximum over the
            replicas; empty if the plans have no prediction.
        planning: how the step was planned; each number is the maximum over all ranks.
    """

    part: StepPart
    tokens: int
    predicted_seconds: float = 0.0
    predicted_peak_bytes: tuple[float, ...] = ()
    planning: Planning = field(default_factory=Planning)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of this rank's lockstep group."""
        return self.part.plans

    def plan_of(self, replica: int) -> Plan:
        """Return the plan of ``replica``, which must be in this rank's lockstep group."""
        return self.part.plan_of(replica)


class AcceptedSteps:
    """Source of the steps that all ranks agree on and that this job can run.

    Args:
        steps: source that supplies the step of each iteration.
        groups: process groups of the job.
        layers: number of layers of each stage.
        current_op: record of this rank's current phase, for the log and the watcher.
        cp: context-parallel size.
        placement: pipeline rank of each stage; empty if stage i is on rank i.
    """

    def __init__(
        self,
        steps: StepSource,
        groups: Groups,
        layers: tuple[int, ...],
        current_op: CurrentOp,
        cp: int = 1,
        placement: tuple[int, ...] = (),
    ):
        self.steps, self.groups, self.layers, self.current_op = steps, groups, layers, current_op
        self.cp, self.placement = cp, placement

    def step(
        self,
        iteration: int,
        lengths: Sequence[int],
        following: Following | None,
        forward_only: bool,
    ) -> AcceptedStep:
        """Return this rank's part of the step that all ranks accept for a batch.

        All ranks of the job must call this method. It also requests plans of the next steps.

        Args:
            iteration: number of the iteration.
            lengths: tokens of each document of the global batch.
            following: function of n that returns the document lengths of the batch n iterations
                later (step_source.Following); None if nothing should be planned ahead.
            forward_only: whether the step is an evaluation.

        Raises:
            PlanError: the ranks have different steps, a rank has no step, or this job cannot run
                the step.
            RuntimeError: the connection to a rank is lost.
        """
        self.current_op.enter("the plan that all ranks agree on")
        try:
            accepted = self._agreed(iteration, lengths, forward_only)
        except RuntimeError as error:
            logger.error("%s; a rank is lost: %s", self.current_op, str(error).splitlines()[0])
            raise
        if following is not None:
            self.steps.look_ahead(iteration, following)
        return accepted

    def _agreed(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> AcceptedStep:
        """Get the step and exchange verdicts with all ranks.

        If ranks have no step or refuse it, all ranks raise the error of one of them. Each rank
        takes part in every exchange, even if it refuses its step, so that no rank blocks.
        """
        groups, control = self.groups, self.groups.control
        verdict, reason, sourced = _FINE, "", None
        try:
            sourced = self.steps.step(iteration, lengths, forward_only)
            job = self.layers, groups.replica, groups.replicas, groups.lockstep
            accept(sourced, lengths, forward_only, *job, self.cp, self.placement)
        except ValueError as refusal:
            verdict = _MISSING if sourced is None else _REFUSED
            reason = str(refusal)
        text = "" if sourced is None else _compared(sourced, lengths)
        absent = (-math.inf,) * DIGEST_NUMBERS
        row = [
            float(verdict * _RANKS + (_RANKS - 1 - control.rank())),
            *(absent if sourced is None else digest_bounds(text)),
            *_facts(None if verdict else sourced, groups),
        ]
        worst, *values = largest(row, control)
        verdict, rank = divmod(int(worst), _RANKS)
        first = _RANKS - 1 - rank
        if verdict < _MISSING and not same_digests(values[:DIGEST_NUMBERS]):
            seen = {f"iteration {iteration}": f"digest {digest(text.encode()).hex()[:16]}"}
            require_same(seen, control, _ONE_PLAN)
        if verdict:
            broadcast_text(None, reason, control, first)
        assert sourced is not None, "a rank without a step is a verdict"
        return _accepted(sourced, groups.replica, sum(lengths), values[DIGEST_NUMBERS:])


def _part(step: Step | StepPart, replica: int) -> StepPart:
    return step if isinstance(step, StepPart) else step.part(replica)


def _compared(sourced: SourcedStep, lengths: Sequence[int]) -> str:
    """Return the text that must be equal on all ranks, which begins with ``lengths``.

    Then comes the full step or, if a rank has only a part of the step, the documents' assignment.
    """
    step, text = sourced.step, sourced.text
    if isinstance(step, StepPart) and step.lockstep < step.replicas:
        text = step.division
    return f"{list(lengths)}\n{text}"


def _facts(sourced: SourcedStep | None, groups: Groups) -> list[float]:
    """Return this rank's values of the numbers in :class:`AcceptedStep`.

    AcceptedStep has their maxima over all ranks, so the list has the same length on every rank.
    """
    ranks = len(groups.pipeline_ranks)
    if sourced is None:
        return [0.0] * (4 + ranks)
    planning, step = sourced.planning, sourced.step
    part = _part(step, groups.replica)
    predictions = [plan.predicted for plan in part.plans if plan.predicted is not None]
    peaks = zip(*(one.peak_gib for one in predictions), strict=True)
    return [
        planning.waited_seconds,
        float(planning.ahead),
        float(planning.discarded),
        max((one.seconds for one in predictions), default=0.0),
        *((max(peak) * GIB for peak in peaks) if predictions else [0.0] * ranks),
    ]


def _accepted(
    sourced: SourcedStep, replica: int, tokens: int, facts: Sequence[float]
) -> AcceptedStep:
    waited, ahead, discarded, seconds, *peaks = facts
    return AcceptedStep(
        _part(sourced.step, replica),
        tokens,
        seconds,
        tuple(peaks) if seconds else (),
        Planning(waited, int(ahead), int(discarded)),
    )


def accept(
    sourced: SourcedStep,
    lengths: Sequence[int],
    forward_only: bool,
    layers: tuple[int, ...],
    replica: int,
    replicas: int,
    lockstep: int = 1,
    cp: int = 1,
    placement: tuple[int, ...] = (),
) -> None:
    """Check that ``replica`` of this job can run the step on these documents.

    Args:
        sourced: step (the plans of one iteration), with its source for error messages.
        lengths: tokens of each document of the global batch.
        forward_only: whether the step must be an evaluation.
        layers: number of layers of each stage of this job.
        replica: data-parallel rank whose part is checked.
        replicas: data-parallel size of this job.
        lockstep: number of replicas over which the experts of a layer are sharded; every rank of
            these replicas has the plans of all of them.
        cp: context-parallel size.
        placement: pipeline rank of each stage; empty if stage i is on rank i.

    Raises:
        PlanError: the replica cannot run the step; the text gives the reason.
        ValueError: the tokens of a document that shares a prefix cannot be read.
    """
    step, source = sourced.step, sourced.source
    if step.replicas != replicas:
        raise PlanError(
            f"{source} is for {step.replicas} data-parallel replicas; this job has {replicas}"
        )
    part = _part(step, replica)
    plan = part.plan_of(replica)
    if plan.layers != layers:
        raise PlanError(
            f"{source} is for {_stages_text(plan.layers)}; this job has {_stages_text(layers)}"
        )
    if plan.place != placement:
        raise PlanError(
            f"{source} is for {_place_text(plan.place)}; this job has {_place_text(placement)} "
            "(--epp-placement)"
        )
    if isinstance(step, Step):
        _require_lengths(source, step.lengths, lengths)
        _require_shared(source, step, lengths)
    else:
        for number, documents in enumerate(part.assignments, part.first):
            batch_lengths = [lengths[document] for document in documents]
            _require_lengths(source, part.lengths_of(number), batch_lengths)
    if step.lockstep % lockstep:
        planned = f"lockstep {step.lockstep}" if step.lockstep > 1 else "replicas that run freely"
        raise PlanError(
            f"{source} is for {planned}; this job's experts are sharded over {lockstep} "
            f"replicas each, which run together: expected a step with 'lockstep {lockstep}'"
        )
    if plan.forward_only != forward_only:
        kind = "evaluation" if plan.forward_only else "training"
        raise PlanError(f"{source} is for {kind} only")
    try:
        check_op_templates(step)
        for one in part.plans:  # the replicas of a lockstep group all start, or none does
            check(one)
            check_ranks(one, cp)
            part.samples_of(one.replica)
    except PlanError as error:
        raise PlanError(f"{source} cannot be run: {error}") from error


def _require_lengths(source: str, planned: Sequence[int], lengths: Sequence[int]) -> None:
    if tuple(planned) != tuple(lengths):
        raise PlanError(
            f"{source} is for {_difference(planned, lengths)}: a plan runs only on documents "
            "of the lengths it was made for (leave --epp-plan out to plan each batch)"
        )


def _require_shared(source: str, step: Step, lengths: Sequence[int]) -> None:
    """Check that documents begin alike where ``step``, which was not planned here, shares them."""
    forest: PrefixForest | None = None
    for replica, plan in enumerate(step.plans):
        for node, (first, *others) in enumerate(step.part(replica).samples_of(replica)):
            stop = plan.offset(node) + plan.documents[node]
            for other in others:
                if forest is None and isinstance(lengths, SharingLengths):
                    forest = lengths.forest()
                forest = forest or PrefixForest.apart(lengths)
                if (common := forest.shared(first, other)) < stop:
                    raise PlanError(
                        f"{source} computes {stop} inputs of documents {first} and {other} once; "
                        f"those of the batch share {common} (--epp-share-from): give the data and "
                        "the --epp-share-from of the run that made the plan"
                    )


def _difference(planned: Sequence[int], batch_lengths: Sequence[int]) -> str:
    if len(planned) != len(batch_lengths):
        return f"{len(planned)} documents; the batch has {len(batch_lengths)}"
    odd = next(
        d for d, pair in enumerate(zip(planned, batch_lengths, strict=True)) if pair[0] != pair[1]
    )
    return (
        f"{planned[odd]} inputs in document {odd}; the batch's document {odd} has "
        f"{batch_lengths[odd]}"
    )


def _place_text(place: Sequence[int]) -> str:
    return f"stages on ranks {' '.join(map(str, place))}" if place else "stage i on rank i"


def _stages_text(layers: Sequence[int]) -> str:
    return f"{len(layers)} stage{'s' * (len(layers) > 1)} of {' '.join(map(str, layers))} layers"
