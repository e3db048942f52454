"""Check that a plan computes everything once, in an order that cannot deadlock."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from megatron_epp.ir.errors import Deadlock, PlanError
from megatron_epp.ir.grid import stuck_grid
from megatron_epp.ir.needs import NeedsOf, needs_of, ops_of_chunk, rules_of
from megatron_epp.ir.op import BACKWARDS, COMPUTE, Kind, Op
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.rules import Need, Rules
from megatron_epp.ir.slices import Slices, slices_of

__all__ = ["backward_of", "check", "check_ranks", "rules_of", "walk"]

_NAMED_RANKS = 8  # most that a deadlock's message names; if more wait, only a cycle of ranks
Done = Sequence[Mapping[Kind, bytearray]]  # ops that have run, by stage, kind and chunk
Lacking = tuple[Need, int, tuple[Op, ...]]


def check(plan: Plan, rules: Rules | None = None) -> None:
    """Check that every rank can run its ops to the end.

    Every token must be computed once (:func:`slices_of`), and every stage must run the ops of every
    chunk once (:func:`ops_of_chunk`). Every op must run after all ops that it needs.

    Args:
        plan: plan to check.
        rules: rule table; default: ``rules_of(plan)``.

    Raises:
        PlanError: the plan breaks a rule. The first line of the message names the violation and its
            place. If ranks are stuck, a grid of the orders follows, with the stuck ops marked.
        Deadlock: ranks wait for each other (a PlanError).
    """
    slices = slices_of(plan)
    if plan.vocabulary_parallel and plan.stages == 1:
        raise PlanError(
            "stage 0 has ops H or G, which shard the LM head over the stages, and is the only "
            "one; expected at least 2 stages, or none of these ops"
        )
    for stage, order in enumerate(plan.orders):
        _check_once(plan, stage, order)
    for _ in walk(plan, slices, rules):
        pass


def check_ranks(plan: Plan, ranks: int) -> None:
    """Raise a PlanError if a document is on a context-parallel rank that does not exist.

    ``ranks`` is the context-parallel size. If it is 1, no document may name a rank (``@RANK``).
    """
    for index, chunk in enumerate(plan.chunks):
        for span in chunk.spans:
            if span.local and (span.rank >= ranks or ranks == 1):
                known = f"one of the ranks 0 to {ranks - 1}" if ranks > 1 else "no @ with one rank"
                raise PlanError(
                    f"chunk {index}: {span} is local to context-parallel rank {span.rank}; "
                    f"expected {known}"
                )


def _check_once(plan: Plan, stage: int, order: tuple[Op, ...]) -> None:
    letters = {kind: kind.value for kind in COMPUTE}
    seen = [""] * len(plan.chunks)  # codes of every chunk's ops, in order
    for op in order:
        code = letters[op.kind]
        if code in seen[op.chunk]:
            count = order.count(op)
            raise PlanError(f"stage {stage}: {op} stands {count} times; expected once")
        seen[op.chunk] += code
    expected = [[kind.value for kind in kinds] for kinds in ops_of_chunk(plan)]
    wanted = {"".join(sorted(kinds)) for kinds in expected}
    for chunk, kinds in enumerate(seen):
        if "".join(sorted(kinds)) not in wanted:
            raise PlanError(
                f"stage {stage}: chunk {chunk} has ops {' '.join(sorted(kinds)) or 'none'}; "
                f"expected {' or '.join(map(' '.join, expected))}"
            )


def walk(
    plan: Plan, slices: Slices | None = None, rules: Rules | None = None
) -> Iterator[tuple[int, Op]]:
    """Yield (stage, op) of all stages, each op after all ops that it needs; O(ops).

    Raises:
        PlanError: the chunks are invalid (:func:`slices_of`), or the ops cannot run in the order of
            their ranks. The message then begins like ``stage 0 at B0: lacks B1 of stage 0``.
    """
    needs = needs_of(plan, rules, slices)
    # Byte arrays, because hashing an op for each lookup costs more.
    done = [{kind: bytearray(len(plan.chunks)) for kind in COMPUTE} for _ in plan.layers]
    orders = plan.rank_orders
    at = [0] * plan.ranks
    pending = sum(map(len, orders))
    # Blocked ranks by the stage and the chunk of an op that they lack. They are checked again after
    # each op that this stage runs for this chunk.
    waiting: dict[tuple[int, int], list[int]] = {}
    ready = list(range(plan.ranks))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while at[rank] < len(order):
            stage, op = order[at[rank]]
            lacking = _lacking(needs, done, stage, op)
            if lacking is not None:
                _, where, ops = lacking
                waiting.setdefault((where, ops[0].chunk), []).append(rank)
                break
            done[stage][op.kind][op.chunk] = 1
            at[rank] += 1
            pending -= 1
            ready += waiting.pop((stage, op.chunk), ())
            yield stage, op
    if pending:
        lacks = [
            _lacking(needs, done, *order[ran]) if ran < len(order) else None
            for order, ran in zip(orders, at, strict=True)
        ]
        _stuck(plan, needs, at, lacks)


def _lacking(needs: NeedsOf, done: Done, stage: int, op: Op) -> Lacking | None:
    """Return ``op``'s first unmet need, and the stage and ops that would meet it, or None."""
    for need, where, ops in needs(stage, op):
        there = done[where]
        for other in ops:
            if there[other.kind][other.chunk]:
                break
        else:
            return need, where, ops
    return None


def _stuck(plan: Plan, needs: NeedsOf, at: list[int], lacking: list[Lacking | None]) -> NoReturn:
    """Raise an error that names what each rank lacks; ``lacking`` is None for finished ranks."""
    waits, marks = {}, {}
    for rank, lack in enumerate(lacking):
        if lack is None:
            continue
        need, where, ops = lack
        planned = next((op for op in ops if op in plan.orders[where]), ops[0])
        marks[rank] = f"lacks {planned} of stage {where}"
        stage, op = plan.rank_orders[rank][at[rank]]
        waits[rank] = f"stage {stage} at {op}: {marks[rank]} ({need.why})"
        # The lacking op is on the same rank: a wrong order, not a deadlock
        if plan.rank_of[where] == rank:
            grid = stuck_grid(plan, needs, at, {rank: marks[rank]}, rank)
            raise PlanError(f"{waits[rank]}\n{grid}")
    circle = _circle(lacking, plan.rank_of)
    named = list(waits) if len(waits) <= _NAMED_RANKS else sorted(circle)[:_NAMED_RANKS]
    line = "; ".join(waits[rank] for rank in named)
    if len(named) < len(waits):
        line += (
            f"; {len(waits) - len(named)} more {'ranks' if plan.shares_ranks else 'stages'} wait"
        )
    raise Deadlock(f"{line}\n{stuck_grid(plan, needs, at, marks, circle[0])}")


def _circle(lacking: Sequence[Lacking | None], rank_of: Sequence[int]) -> list[int]:
    """Return the ranks of a cycle: every rank waits for the next one, the last for the first."""
    path: list[int] = []
    rank = next(rank for rank, lack in enumerate(lacking) if lack is not None)
    while rank not in path:
        path.append(rank)
        lack = lacking[rank]
        assert lack is not None, "a rank that has run all its ops keeps nobody waiting"
        rank = rank_of[lack[1]]
    return path[path.index(rank) :]


def backward_of(plan: Plan) -> tuple[dict[int, Kind], ...]:
    """Return for every stage the kind (B or I) of the backward of each chunk."""
    return tuple(
        {op.chunk: op.kind for op in order if op.kind in BACKWARDS} for order in plan.orders
    )
