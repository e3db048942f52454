"""A step is taken only by all ranks alike, and only if it fits this job and these documents."""

import logging
import time
from collections.abc import Sequence

from megatron_epp.control.step_source import SourcedStep, StepSource
from megatron_epp.ir import Plan, PlanError, Step, check, check_op_templates, check_ranks
from megatron_epp.runtime.consensus import agree
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)


class AcceptedSteps:
    """The steps of ``steps`` that all ranks agree on and this job can run.

    layers           of every stage of this job
    placement        the pipeline rank of every stage; none where stage i lies on rank i
    cp               context-parallel ranks of a stage
    whole            whether the model trains on whole documents only, each spread over all ranks
    waited_seconds   how long training waited for the latest
    """

    def __init__(
        self,
        steps: StepSource,
        groups: Groups,
        layers: tuple[int, ...],
        current_op: CurrentOp,
        cp: int = 1,
        full_documents: bool = False,
        placement: tuple[int, ...] = (),
    ):
        self.steps, self.groups, self.layers, self.current_op = steps, groups, layers, current_op
        self.cp, self.whole, self.placement = cp, full_documents, placement
        self.waited_seconds = 0.0

    def step(
        self,
        iteration: int,
        lengths: Sequence[int],
        following: Sequence[int] | None,
        forward_only: bool,
    ) -> Step:
        """The step for documents of ``lengths``; ``following``: those of the next iteration, to be
        planned meanwhile. PlanError: ranks differ, or this job cannot run the step."""
        self.current_op.enter("the plan that all ranks agree on")
        began = time.perf_counter()
        try:
            sourced = self.steps.step(iteration, lengths, forward_only)
            agree(f"{list(lengths)}\n{sourced.text}", f"iteration {iteration}", self.groups.control)
        except RuntimeError as error:
            logger.error("%s; a rank is lost: %s", self.current_op, str(error).splitlines()[0])
            raise
        groups = self.groups
        place = groups.replica, groups.replicas, groups.lockstep
        job = self.layers, *place, self.cp, self.whole, self.placement
        accept(sourced, lengths, forward_only, *job)
        if following is not None:
            self.steps.look_ahead(iteration + 1, following)
        self.waited_seconds = time.perf_counter() - began
        return sourced.step


def accept(
    sourced: SourcedStep,
    lengths: Sequence[int],
    forward_only: bool,
    layers: tuple[int, ...],
    replica: int,
    replicas: int,
    lockstep: int = 1,
    cp: int = 1,
    full_documents: bool = False,
    placement: tuple[int, ...] = (),
) -> None:
    """Raise a PlanError unless ``replica`` of this job can run the step on these documents.

    ``placement``: the pipeline rank of every stage, none where stage i lies on rank i. ``cp``:
    context-parallel ranks of a stage. ``full_documents``: whether training takes whole documents
    only. ``lockstep``: replicas that share the experts of a layer. Whether theirs have one skeleton
    every rank looks up for all blocks: each holds the whole step, and :func:`agree` has compared
    its text, so all refuse it, or none.
    """
    step, source = sourced.step, sourced.source
    if len(step.plans) != replicas:
        raise PlanError(
            f"{source} is for {len(step.plans)} data-parallel replicas; this job has {replicas}"
        )
    plan = step.plans[replica]
    if plan.layers != layers:
        raise PlanError(
            f"{source} is for {_stages_text(plan.layers)}; this job has {_stages_text(layers)}"
        )
    if plan.place != placement:
        raise PlanError(
            f"{source} is for {_place_text(plan.place)}; this job has {_place_text(placement)} "
            "(--epp-placement)"
        )
    if step.lengths != tuple(lengths):
        raise PlanError(
            f"{source} is for {_difference(step.lengths, lengths)}: a plan runs only on documents "
            "of the lengths it was made for (leave --epp-plan out to plan each batch)"
        )
    if step.lockstep % lockstep:
        planned = f"lockstep {step.lockstep}" if step.lockstep > 1 else "replicas that run freely"
        raise PlanError(
            f"{source} is for {planned}; this job's experts are spread over {lockstep} "
            f"replicas each, which run together: expected a step with 'lockstep {lockstep}'"
        )
    if plan.forward_only != forward_only:
        kind = "evaluation" if plan.forward_only else "training"
        raise PlanError(f"{source} is for {kind} only")
    try:
        check_op_templates(step)
        for one in step.block(replica):  # a block begins together, or not at all
            check(one)
            check_ranks(one, cp)
            if full_documents and not forward_only:
                _require_full_documents(one)
    except PlanError as error:
        raise PlanError(f"{source} cannot be run: {error}") from error


def _require_full_documents(plan: Plan) -> None:
    """Raise a PlanError where a span is no whole document on all ranks."""
    for number, chunk in enumerate(plan.chunks):
        for span in chunk.spans:
            if span.local or span.tokens != plan.documents[span.document]:
                raise PlanError(
                    f"chunk {number} has {span}, and this model's routers compare all tokens of a "
                    "document (sinkhorn): expected whole documents, local to no rank"
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
