"""Common sequence of the ops of all ranks, in which producers precede consumers.

Every rank issues its ops and messages in this sequence (:mod:`.lower`), so it must be the same on
all ranks. It therefore depends on the plan alone, or on all plans of a lockstep group. Ops are
ordered by their ends, computed from estimated durations. If real durations differ, a message may
start a little late (scripts/bench/results/2026-11-22-issue-order.md), but it always arrives.
"""

from collections.abc import Iterator, Mapping, Sequence

from megatron_epp.ir.check import walk
from megatron_epp.ir.needs import needs_of
from megatron_epp.ir.op import BACKWARDS, COMPUTE, Kind, Op
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.recompute import FULL
from megatron_epp.ir.rules import Rules
from megatron_epp.ir.slices import slices_of

# Query-key pairs that cost as much as the linear layers of one token: 6 x hidden, for a layer with
# 12 hidden^2 weights and a hidden size of 4096.
PAIRS_PER_TOKEN = 6 * 4096

# Work of an op, in forwards of its chunk through the stage; other kinds count as 0.
FORWARDS: Mapping[Kind, int] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT: 1,
    Kind.WEIGHT: 1,
}
# Work of an op on a stage's vocabulary rows, roughly, in forwards of its chunk through one layer.
LAYERS: Mapping[Kind, int] = {Kind.HEAD: 1, Kind.HEAD_WEIGHT: 1}


def sequence(
    plan: Plan, rules: Rules | None = None, block: Sequence[Plan] = ()
) -> Iterator[tuple[int, Op]]:
    """Yield (stage, op) of every op of ``plan``, ordered by the estimated ends of the ops.

    The arithmetic is in integers, so that all machines get the same order; O(n log n) for n ops.

    Args:
        plan: plan of the ops.
        rules: rule table; default: ``rules_of(plan)``.
        block: plans of the lockstep group, including ``plan``; empty without lockstep. The
            estimates take the longest duration of each op over these plans, so that all plans have
            the same sequence.

    Raises:
        PlanError: the plan cannot run (:func:`~megatron_epp.ir.check.walk`).
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
            for other in ops:  # an op that has not run ends at 0
                start = max(start, ends[other.kind][where][other.chunk])
        layers = FORWARDS.get(kind, 0) * plan.layers[stage] + LAYERS.get(kind, 0)
        if kind in BACKWARDS:
            layers += max(one.recompute[stage][chunk].count(FULL) for one in together)
        stop = start + layers * units[chunk]
        free[rank] = ends[kind][stage][chunk] = stop
        ended.append((stop, place, stage, op))
    ended.sort()  # ties stay in the order of walk(): producers first
    for _, _, stage, op in ended:
        yield stage, op


def _units(plan: Plan) -> list[int]:
    """Return the work of every chunk in one layer, in query-key pairs."""
    return [
        PAIRS_PER_TOKEN * chunk.tokens + plan.pairs(number)
        for number, chunk in enumerate(plan.chunks)
    ]
