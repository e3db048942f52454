"""Whether a plan computes everything once, in an order in which no stage waits forever."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from megatron_epp.ir.errors import Deadlock, PlanError
from megatron_epp.ir.op import BACKWARDS, COMPUTE, Kind, Op
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
    letters = {kind: kind.value for kind in COMPUTE}
    found = [""] * len(plan.chunks)  # the letters of every chunk's ops, in order
    for op in order:
        letter = letters[op.kind]
        if letter in found[op.chunk]:
            count = order.count(op)
            raise PlanError(f"stage {stage}: {op} stands {count} times; expected once")
        found[op.chunk] += letter
    expected = ("F",) if plan.forward_only else ("FB", "FIW")
    wanted = {"".join(sorted(kinds)) for kinds in expected}
    for chunk, kinds in enumerate(found):
        if "".join(sorted(kinds)) not in wanted:
            raise PlanError(
                f"stage {stage}: chunk {chunk} has ops {' '.join(sorted(kinds)) or 'none'}; "
                f"expected {' or '.join(' '.join(ops) for ops in expected)}"
            )


class _Needs:
    """What every op needs, and what has been done: flags, as hashing an Op for each costs more."""

    def __init__(self, plan: Plan, slices: Slices):
        chunks = len(plan.chunks)
        self.stages = plan.stages
        self.rows: dict[Kind, list[tuple[Need, Sequence[int]]]] = {
            kind: [
                (need, [slices.related(chunk, need.chunk) for chunk in range(chunks)])
                for need in rule.needs
            ]
            for kind, rule in rules_of(plan).items()
        }
        self.done = [{kind: bytearray(chunks) for kind in COMPUTE} for _ in plan.layers]

    def lacking(self, stage: int, op: Op) -> tuple[Need, int, int] | None:
        """The first unmet need of ``op`` with its stage and chunk, or None."""
        for need, related in self.rows[op.kind]:
            where, chunk = stage + need.stage, related[op.chunk]
            if chunk < 0 or not 0 <= where < self.stages:
                continue
            done = self.done[where]
            for kind in need.kinds:
                if done[kind][chunk]:
                    break
            else:
                return need, where, chunk
        return None


def walk(plan: Plan, slices: Slices) -> Iterator[tuple[int, Op]]:
    """The ops of all stages in an order that meets every need; O(ops).

    Raises where none exists: ``stage 0 at B0: lacks B1 of stage 0``.
    """
    needs = _Needs(plan, slices)
    at = [0] * plan.stages
    pending = sum(map(len, plan.orders))
    # A stage that stands still is looked at again only when an op of the chunk that it lacks, on
    # the stage that it lacks it from, is done.
    waiting: dict[tuple[int, int], list[int]] = {}
    ready = list(range(plan.stages))
    while ready:
        stage = ready.pop()
        order = plan.orders[stage]
        while at[stage] < len(order):
            op = order[at[stage]]
            lacking = needs.lacking(stage, op)
            if lacking is not None:
                waiting.setdefault(lacking[1:], []).append(stage)
                break
            needs.done[stage][op.kind][op.chunk] = 1
            at[stage] += 1
            pending -= 1
            ready += waiting.pop((stage, op.chunk), ())
            yield stage, op
    if pending:
        _stuck(plan, needs, at)


def _stuck(plan: Plan, needs: _Needs, at: list[int]) -> NoReturn:
    waits = []
    for stage, order in enumerate(plan.orders):
        if at[stage] == len(order):
            continue
        op = order[at[stage]]
        lacking = needs.lacking(stage, op)
        assert lacking is not None  # or the stage would have gone on
        need, where, chunk = lacking
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
