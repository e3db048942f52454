"""Plan of an external training loop's call if ranks have several stages.

The default is Megatron's interleaved order, or the ZB-V order if stages form a V. A faster order
replaces the default if no rank needs more memory than the default's fullest rank, plus headroom.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from megatron_epp.ir import Plan, Prediction, Table
from megatron_epp.planner.calls.call_cost import CallChunks, chunks_in, token_table
from megatron_epp.planner.calls.call_options import AS_CALLED, PLANNED, CallOptions
from megatron_epp.planner.calls.group_order import (
    GroupSearch,
    orders_worth_playing,
    problem_of_call,
    search_ops,
)
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.emit import ops_of_ranks, orders_of_ranks
from megatron_epp.planner.order.list_scheduler import Policy, list_schedule
from megatron_epp.planner.order.policies import warm_up_policies, warm_up_policy
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.warmup import interleaved_warm_up
from megatron_epp.planner.published.schedules import is_v
from megatron_epp.sim.play import play

Ran = list[tuple[int, int, int]]  # (op kind's code, chunk, stage) of a rank's ops


def placed_plan(
    call: CallChunks,
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
    place: tuple[int, ...],
) -> Plan:
    """Return the plan of a call with stage s on rank ``place[s]``.

    Forward-only passes run in the caller's order.

    Args:
        call: the chunks.
        layers: number of layers of every stage.
        rates_SK3: [stages, op kinds, 3] seconds per token, query-key pair and op.
        options: allowed changes to the order, and memory limits.
        forward_only: whether the call has no backwards.
        place: rank of every stage.
    """
    table, ranks = token_table(call, rates_SK3, options.token_bytes), 1 + max(place)
    if is_v(place):
        turns = v_turns(call, table, place, forward_only)
    else:
        turns = call_turns(call.chunking.count, ranks, len(layers), forward_only)
    as_called = _plan(call, layers, turns, place)
    played = play(as_called, table)
    as_called = _predicted(as_called, played.seconds, AS_CALLED)
    if forward_only or not (options.reorder or options.split):
        return as_called
    problem = replace(problem_of_call(call, table, np.full(ranks, np.inf)), place=place)
    ops = search_ops(played.seconds) // 2  # half for each of the two budgets
    search = GroupSearch[Policy](problem, call.sizes, ops, lambda work, sizes: lambda one: one)
    every = _policies(problem, call.sizes, options.split)
    for _ in search.within(options.budgets(np.array(played.peak_bytes, float))):
        search.play(range(len(call.sizes)), every)
        if options.reorder:
            for order in orders_worth_playing(problem, call.sizes):
                search.play(order, every)
            search.climb()
    best = search.best
    if best is None or not options.pays(best.seconds, played.seconds):
        return as_called
    schedule = best.schedule
    numbers = chunks_in(best.order, call.sizes)[schedule.chunks]
    plan = _plan(call, layers, ops_of_ranks(schedule.kinds, numbers, schedule.stages), place)
    return _predicted(plan, play(plan, table).seconds, PLANNED)


def _policies(problem: ScheduleProblem, sizes: np.ndarray, split: bool) -> list[Policy]:
    """Return the policies to try: first Megatron's (or ZB-V's) warm-up, then other warm-ups."""
    place, splits = problem.place, (True, False) if split else (False,)
    ranks, v = 1 + max(place), is_v(place)
    warm = np.full(ranks, 2 * ranks) if v else interleaved_warm_up(ranks, len(place)) + 1
    held = [
        warm_up_policy(place, problem.chunks, warm, split=halves, deep=deep, strict=strict)
        for halves in (splits if v else (False,))
        for strict in (True, False)
        for deep in (True, False)
    ]
    return [*held, *(policy for policy, _ in warm_up_policies(place, sizes, splits))]


def v_turns(
    call: CallChunks, table: Table, place: tuple[int, ...], forward_only: bool
) -> list[Ran]:
    """Return the ops of every rank for stages in a V, with micro-batches in the caller's order.

    Backwards are not split. The number of forwards in flight is that of ZB-V (arXiv 2401.10241).

    Args:
        call: the chunks.
        table: seconds and bytes of the chunks' ops.
        place: rank of every stage.
        forward_only: whether the call has no backwards.
    """
    ranks, chunks = 1 + max(place), call.chunking.count
    if forward_only:
        flow = sorted(product(range(chunks), range(len(place))), key=lambda each: (sum(each), each))
        return [[(F, c, s) for c, s in flow if place[s] == rank] for rank in range(ranks)]
    problem = replace(problem_of_call(call, table, np.full(ranks, np.inf)), place=place)
    warm = np.full(ranks, 2 * ranks)
    policy = warm_up_policy(place, chunks, warm, split=False, deep=True, strict=True)
    schedule = list_schedule(problem, policy)
    of_ranks = zip(schedule.kinds, schedule.chunks, schedule.stages, strict=True)
    return [list(zip(*(row.tolist() for row in rows), strict=True)) for rows in of_ranks]


def call_turns(chunks: int, ranks: int, stages: int, forward_only: bool) -> list[Ran]:
    """Return the ops of every rank in the order of Megatron's interleaved schedule.

    In each round, ``ranks`` micro-batches run through the first model chunk, then through the
    second, and so on. Forwards fill the pipeline, then one forward and one backward alternate
    (arXiv 2104.04473, section 2.2). Megatron requires a number of micro-batches that is a multiple
    of the number of ranks. For other numbers, this function takes the order for the next multiple
    and drops the ops of the surplus micro-batches.

    Args:
        chunks: number of micro-batches.
        ranks: number of pipeline ranks.
        stages: number of stages.
        forward_only: whether the call has no backwards.
    """
    parts = stages // ranks
    order = [
        (chunk, part)
        for first in range(0, chunks, ranks)
        for part in range(parts)
        for chunk in range(first, first + ranks)
    ]
    turns = []
    for rank in range(ranks):
        forwards = [(F, chunk, part * ranks + rank) for chunk, part in order]
        backwards = [(B, chunk, (parts - 1 - part) * ranks + rank) for chunk, part in order]
        warm = min(int(interleaved_warm_up(ranks, stages)[rank]), len(order))
        if forward_only:
            turns.append(forwards)
            continue
        ran = forwards[:warm]
        for number, backward in enumerate(backwards):
            ran += [*forwards[warm + number : warm + number + 1], backward]
        turns.append(ran)
    return [[one for one in ran if one[1] < chunks] for ran in turns]


def _plan(
    call: CallChunks, layers: Sequence[int], ran: Sequence[Ran], place: Sequence[int]
) -> Plan:
    orders, turns = orders_of_ranks(ran, len(layers))
    return replace(call.plan(layers), place=tuple(place), turns=turns, orders=orders)


def _predicted(plan: Plan, seconds: float, by: str) -> Plan:
    return replace(plan, predicted=Prediction(seconds, (0.0,) * plan.ranks, by))
