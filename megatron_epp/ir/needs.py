"""Needs between the ops of a plan, derived from the rule table."""

from collections.abc import Callable, Iterator

from megatron_epp.ir.op import Kind, Op
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.rules import CHUNK_OPS, Need, Rules, rules_for
from megatron_epp.ir.slices import Slices, slices_of

# Given a stage and an op, yields each need that the op has there, the stage that meets the need,
# and the ops that would meet it. One of these ops is enough: a backward is a B or an I.
NeedsOf = Callable[[int, Op], Iterator[tuple[Need, int, tuple[Op, ...]]]]


def rules_of(plan: Plan) -> Rules:
    """Return the rule table that applies to ``plan``."""
    return rules_for(plan.vocabulary_parallel, plan.forward_only)


def ops_of_chunk(plan: Plan) -> tuple[tuple[Kind, ...], ...]:
    """Return alternative sets of op kinds; a stage runs one set for each chunk of ``plan``."""
    kinds = rules_of(plan)
    sets = (tuple(kind for kind in each if kind in kinds) for each in CHUNK_OPS)
    return tuple(dict.fromkeys(sets))


def needs_of(plan: Plan, rules: Rules | None = None, slices: Slices | None = None) -> NeedsOf:
    """Return a function that yields the needs of an op of ``plan``.

    A need of the rule table applies to an op whose stage is in ``need.at``. The stage and the chunk
    that would meet the need must exist: stage 0 has no previous stage, a first slice no earlier
    chunk. If several documents continue a chunk, its backward has one need for each of their
    chunks. Needs do not depend on the ranks of the stages.

    Args:
        plan: plan of the ops.
        rules: rule table; default: ``rules_of(plan)``.
        slices: slices of ``plan``, if the caller has them; default: ``slices_of(plan)``.

    Returns:
        Function of a stage and an op that yields (need, stage that meets the need, ops that would
        meet the need).

    Raises:
        PlanError: the chunks do not compute every token once (:func:`~.slices.slices_in`).

    Example:
        for need, stage, ops in needs_of(plan)(2, Op(Kind.BACKWARD, 0)): ...
    """
    rules = rules_of(plan) if rules is None else rules
    slices = slices_of(plan) if slices is None else slices
    stages, chunks = plan.stages, range(len(plan.chunks))
    kinds = {kind for rule in rules.values() for need in rule.needs for kind in need.kinds}
    ops = {kind: [Op(kind, chunk) for chunk in chunks] for kind in kinds}
    # By kind and chunk, independent of the stage, because creating ops dominates the cost here.
    rows: dict[Kind, list[list[tuple[Need, tuple[Op, ...]]]]] = {
        kind: [
            [
                (need, tuple([ops[other][related] for other in need.kinds]))
                for need in rule.needs
                for related in slices.all_related(chunk, need.chunk)
            ]
            for chunk in chunks
        ]
        for kind, rule in rules.items()
    }

    def needs(stage: int, op: Op) -> Iterator[tuple[Need, int, tuple[Op, ...]]]:
        for need, would in rows[op.kind][op.chunk]:
            where = need.met_on(stage, stages)
            if where >= 0:
                yield need, where, would

    return needs
