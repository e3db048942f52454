"""Whether a plan computes everything once, in an order in which no stage waits forever."""

from collections import Counter
from collections.abc import Iterator, Mapping

from megatron_epp.ir.errors import Deadlock, PlanError
from megatron_epp.ir.op import BACKWARDS, Kind, Op
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.rules import EVALUATION, TRAINING, Need, Rule
from megatron_epp.ir.slices import Slices, slices_of

_SHOWN_OPS = 60


def rules_of(plan: Plan) -> Mapping[Kind, Rule]:
    """The rule table that governs ``plan``: training, or evaluation for a plan of forwards only."""
    return EVALUATION if plan.forward_only else TRAINING


def check(plan: Plan) -> None:
    """Raise a :class:`PlanError` unless every stage can run its ops to the end.

    Every input is computed once (:func:`slices_of`); every stage runs every chunk's F once, and
    its B, or its I and its W, once, unless the plan is for evaluation; everything an op needs
    comes before it. One line says what and where; the drawn orders follow it.
    """
    slices = slices_of(plan)
    for stage, order in enumerate(plan.orders):
        _check_once(plan, stage, order)
    for _ in walk(plan, slices):
        pass


def _check_once(plan: Plan, stage: int, order: tuple[Op, ...]) -> None:
    counts = Counter(order)
    for op, count in counts.items():
        if count > 1:
            raise PlanError(f"stage {stage}: {op} stands {count} times; expected once")
    for chunk in range(len(plan.chunks)):
        kinds = "".join(k for k in "FBIW" if Op(Kind(k), chunk) in counts)
        expected = ("F",) if plan.forward_only else ("FB", "FIW")
        if kinds not in expected:
            raise PlanError(
                f"stage {stage}: chunk {chunk} has ops {' '.join(kinds) or 'none'}; expected "
                f"{' or '.join(' '.join(ops) for ops in expected)}"
            )


def walk(plan: Plan, slices: Slices) -> Iterator[tuple[int, Op]]:
    """The ops of all stages in an order that meets every need; O(ops).

    Raises where none exists: ``stage 0 at B0: lacks B1 of stage 0``.
    """
    rules = rules_of(plan)
    at = [0] * plan.stages
    done: list[set[Op]] = [set() for _ in range(plan.stages)]
    pending = sum(map(len, plan.orders))
    while pending:
        before = pending
        for stage, order in enumerate(plan.orders):
            while at[stage] < len(order):
                op = order[at[stage]]
                if _lacking(plan, slices, rules, done, stage, op) is not None:
                    break
                done[stage].add(op)
                at[stage] += 1
                pending -= 1
                yield stage, op
        if pending == before:
            _stuck(plan, slices, rules, done, at)


def _lacking(plan, slices, rules, done, stage: int, op: Op) -> tuple[Need, int, int] | None:
    """The first unmet need of ``op`` with its stage and chunk, or None."""
    for need in rules[op.kind].needs:
        where = stage + need.stage
        chunk = slices.related(op.chunk, need.chunk)
        if not 0 <= where < plan.stages or chunk < 0:
            continue
        if not any(Op(kind, chunk) in done[where] for kind in need.kinds):
            return need, where, chunk
    return None


def _stuck(plan, slices, rules, done, at):
    waits = []
    for stage, order in enumerate(plan.orders):
        if at[stage] == len(order):
            continue
        op = order[at[stage]]
        need, where, chunk = _lacking(plan, slices, rules, done, stage, op)
        planned = [k for k in need.kinds if Op(k, chunk) in plan.orders[where]] or need.kinds
        line = f"stage {stage} at {op}: lacks {planned[0].value}{chunk} of stage {where}"
        if where == stage:  # no other stage can mend that: a wrong order, not a deadlock
            raise PlanError(f"{line} ({need.why})\n{_drawn(plan, at)}")
        waits.append(f"{line} ({need.why})")
    raise Deadlock("; ".join(waits) + "\n" + _drawn(plan, at))


def _drawn(plan: Plan, at: list[int]) -> str:
    """The orders of all stages; ``>`` marks the op that each stands at."""
    lines = []
    for stage, order in enumerate(plan.orders):
        first = max(0, at[stage] - _SHOWN_OPS // 2)
        words = [
            f">{op}" if index == at[stage] else str(op)
            for index, op in enumerate(order[first : first + _SHOWN_OPS], first)
        ]
        more = "... " if first else ""
        lines.append(f"  stage {stage}: {more}{' '.join(words)}")
    return "\n".join(lines)


def backward_of(plan: Plan) -> tuple[dict[int, Kind], ...]:
    """For every stage, the kind (B or I) that hands each chunk's gradient on."""
    return tuple(
        {op.chunk: op.kind for op in order if op.kind in BACKWARDS} for order in plan.orders
    )
