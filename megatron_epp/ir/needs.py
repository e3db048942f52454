"""Needs of a plan's ops among each other: the one loop over the rule table's needs."""

from collections.abc import Callable, Iterator

from megatron_epp.ir.op import Kind, Op
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.rules import CHUNK_OPS, Need, Rules, rules_for
from megatron_epp.ir.slices import Slices, slices_of

# Of an op on a stage: each need that exists there, the stage that meets it, and the ops that would.
# One of them is enough: a backward is a B or an I.
NeedsOf = Callable[[int, Op], Iterator[tuple[Need, int, tuple[Op, ...]]]]


def rules_of(plan: Plan) -> Rules:
    """The rules that govern ``plan``."""
    return rules_for(plan.vocabulary_parallel, plan.forward_only)


def ops_of_chunk(plan: Plan) -> tuple[tuple[Kind, ...], ...]:
    """The sets of ops of which every stage runs one for every chunk of ``plan``."""
    kinds = rules_of(plan)
    sets = (tuple(kind for kind in each if kind in kinds) for each in CHUNK_OPS)
    return tuple(dict.fromkeys(sets))


def needs_of(plan: Plan, rules: Rules | None = None, slices: Slices | None = None) -> NeedsOf:
    """Look up what an op of ``plan`` needs: ``for need, stage, ops in needs_of(plan)(stage, op)``.

    A need that speaks of a stage before the first or behind the last, or of other stages than the
    op's, or of a slice that the chunk's documents have not, does not exist. A need that speaks of
    several slices, as a backward's of all branches, comes once for each. Stages are those of the
    pipeline, wherever they run.

    rules    default: those that govern ``plan``
    slices   of ``plan``, where they are known already
    """
    rules = rules_of(plan) if rules is None else rules
    slices = slices_of(plan) if slices is None else slices
    stages, chunks = plan.stages, range(len(plan.chunks))
    kinds = {kind for rule in rules.values() for need in rule.needs for kind in need.kinds}
    ops = {kind: [Op(kind, chunk) for chunk in chunks] for kind in kinds}
    # By kind and chunk, whatever the stage: making ops costs more than all else here.
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
