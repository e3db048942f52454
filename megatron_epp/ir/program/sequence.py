"""One sequence of the ops of all ranks, in which causes come first.

Every rank issues its ops and messages as this sequence has them (:mod:`.lower`), so
it must be the same on all ranks: it follows from the plan alone. Ops stand where they would end if
each took as long as it has work. Real durations differ; what that costs is a message that starts a
little late (scripts/bench/issue_order.py), never one that cannot come.
"""

from collections.abc import Iterator, Mapping, Sequence

from megatron_epp.ir.check import walk
from megatron_epp.ir.needs import needs_of
from megatron_epp.ir.op import BACKWARDS, COMPUTE, Kind, Op
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.recompute import FULL
from megatron_epp.ir.rules import Rules
from megatron_epp.ir.slices import slices_of

# A token's share of the linear layers costs as much as so many query-key pairs: 6 x hidden of a
# layer of 12 hidden^2 weights, for a hidden size of 4096.
PAIRS_PER_TOKEN = 6 * 4096

# The work of an op in forwards of its chunk through the stage; other kinds pass in no time.
FORWARDS: Mapping[Kind, int] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT: 1,
    Kind.WEIGHT: 1,
}
# In forwards of its chunk through one layer: a stage's part of the vocabulary is about as much.
LAYERS: Mapping[Kind, int] = {Kind.HEAD: 1, Kind.HEAD_WEIGHT: 1}


def sequence(
    plan: Plan, rules: Rules | None = None, block: Sequence[Plan] = ()
) -> Iterator[tuple[int, Op]]:
    """(stage, op) of every op of ``plan``, in the order in which they would end.

    Whole numbers only, so that all machines agree; O(n log n) for n ops. Raises as ``walk`` does
    where the plan cannot run.

    rules   default: those that govern ``plan``
    block   the plans that run in lockstep with it, itself among them: every op ends as late as the
            latest of theirs, so that all have one sequence
    """
    slices = slices_of(plan)
    needs, together = needs_of(plan, rules, slices), block or (plan,)
    units = [max(each) for each in zip(*map(_units, together), strict=True)]
    ends = {kind: [[0] * len(plan.chunks) for _ in plan.layers] for kind in COMPUTE}
    rank_of, free = plan.rank_of, [0] * plan.ranks
    ended = []
    for place, (stage, op) in enumerate(walk(plan, slices, rules)):
        kind, chunk, rank = op.kind, op.chunk, rank_of[stage]
        start = free[rank]
        for _, where, ops in needs(stage, op):
            for other in ops:  # what has not run has ended at 0
                start = max(start, ends[other.kind][where][other.chunk])
        layers = FORWARDS.get(kind, 0) * plan.layers[stage] + LAYERS.get(kind, 0)
        if kind in BACKWARDS:
            layers += max(one.recompute[stage][chunk].count(FULL) for one in together)
        stop = start + layers * units[chunk]
        free[rank] = ends[kind][stage][chunk] = stop
        ended.append((stop, place, stage, op))
    ended.sort()  # at one time, as walk has them: causes first
    for _, _, stage, op in ended:
        yield stage, op


def _units(plan: Plan) -> list[int]:
    """The work of every chunk in one layer, in query-key pairs."""
    return [
        PAIRS_PER_TOKEN * chunk.tokens + plan.pairs(number)
        for number, chunk in enumerate(plan.chunks)
    ]
