"""The plan of a call whose ranks have several parts of the model: Megatron's own interleaved order,
or a faster one of whole micro-batches that holds no more at once."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from megatron_epp.ir import Plan, Prediction, Table, rules_for
from megatron_epp.planner.calls.call_cost import CallChunks, chunks_in, token_table
from megatron_epp.planner.calls.call_options import AS_GIVEN, PLANNED, CallOptions
from megatron_epp.planner.calls.group_order import (
    ROUNDING,
    arranged,
    neighbour,
    orders_worth_playing,
    search_ops,
)
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.emit import ops_of_ranks, orders_of_ranks
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.virtual.pipeline import warm_up_policies, warm_up_policy
from megatron_epp.sim.inputs import op_arrays
from megatron_epp.sim.play import play

Ran = list[tuple[int, int, int]]  # (kind's code, chunk, stage) of a rank's ops


def interleaved_plan(
    call: CallChunks,
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
    ranks: int,
) -> Plan:
    """Stage s on rank s modulo ``ranks``. Passes of forwards are in the caller's order."""
    table = token_table(call, rates_SK3)
    as_given = _played(
        _plan(call, layers, given_turns(call.chunking.count, ranks, len(layers), forward_only)),
        table,
        AS_GIVEN,
    )
    if forward_only or not (options.reorder or options.split):
        return as_given
    given = play(as_given, table)
    room = np.array(given.peak_bytes, float) * (1 + options.headroom)
    ops = op_arrays(table, call.loads, rules_for(False))
    chunking, place = call.chunking, as_given.place
    problem = ScheduleProblem(ops, chunking.backward, chunking.last_of_group, room, place)
    search = _Search(problem, call.sizes, options.split, search_ops(given.seconds))
    search.play(range(len(call.sizes)), search.every)
    if options.reorder:
        for order in orders_worth_playing(problem, call.sizes):
            search.play(order, search.every)
        search.climb()
    if search.best is None or not options.pays(search.best.seconds, given.seconds):
        return as_given
    found = search.best
    numbers = chunks_in(search.order, call.sizes)[found.chunks]
    ran = ops_of_ranks(found.kinds, numbers, found.stages)
    return _played(_plan(call, layers, ran), table, PLANNED)


class _Search:
    """The fastest schedule that fits, ``best``, its ``order`` of groups and its policy, within
    ``ops`` that may be played."""

    def __init__(self, problem: ScheduleProblem, sizes: np.ndarray, split: bool, ops: int):
        self.problem, self.sizes, self.left = problem, sizes, ops
        place, chunks = problem.place, problem.chunks
        ranks = 1 + max(place)
        warm = np.array(megatrons_warm_up(ranks, len(place))) + 1
        held = [
            warm_up_policy(place, chunks, warm, split=False, deep=deep, strict=strict)
            for strict in (True, False)
            for deep in (True, False)
        ]
        splits = (True, False) if split else (False,)
        self.every = [*held, *(policy for policy, _ in warm_up_policies(place, sizes, splits))]
        self.best: Schedule | None = None
        self.order: tuple[int, ...] = ()
        self.policy = held[0]

    def play(self, order: Sequence[int], by: Sequence[Policy]) -> bool:
        """Play ``order``; whether it is the best so far."""
        better, work = False, arranged(self.problem, order, self.sizes)
        for policy in by:
            if self.left <= 0:
                break
            self.left -= work.stages * work.chunks * (3 if policy.split else 2)
            found = list_schedule(work, policy)
            if found.over_bytes > 0 or not np.isfinite(found.seconds):
                continue
            if self.best is None or found.seconds < self.best.seconds * (1 - ROUNDING):
                self.best, self.order, self.policy, better = found, tuple(order), policy, True
        return better

    def climb(self) -> None:
        """Try neighbours of the best order as long as one pays and work is left."""
        random, since = Random(0), 0
        while self.best is not None and self.left > 0 and since < 4 * len(self.order):
            if len(self.order) < 3:
                return
            since = 0 if self.play(neighbour(self.order, random), [self.policy]) else since + 1


def given_turns(chunks: int, ranks: int, stages: int, forward_only: bool) -> list[Ran]:
    """Every rank's ops in the order of Megatron's schedule: as many micro-batches as there are
    ranks go through one part after another; forwards that fill the pipeline, then one forward and
    one backward in turn (arXiv 2104.04473, section 2.2). Megatron wants a multiple of the ranks: of
    other numbers it is the order of the next multiple, without those that there are not."""
    parts = stages // ranks
    order = [
        (chunk, part)
        for first in range(0, chunks, ranks)
        for part in range(parts)
        for chunk in range(first, first + ranks)
    ]
    made = []
    for rank in range(ranks):
        forwards = [(F, chunk, part * ranks + rank) for chunk, part in order]
        backwards = [(B, chunk, (parts - 1 - part) * ranks + rank) for chunk, part in order]
        warm = min(megatrons_warm_up(ranks, stages)[rank], len(order))
        if forward_only:
            made.append(forwards)
            continue
        ran = forwards[:warm]
        for number, backward in enumerate(backwards):
            ran += [*forwards[warm + number : warm + number + 1], backward]
        made.append(ran)
    return [[one for one in ran if one[1] < chunks] for ran in made]


def megatrons_warm_up(ranks: int, stages: int) -> list[int]:
    """Forwards of every rank before its first pair of a forward and a backward."""
    return [2 * (ranks - rank - 1) + stages - ranks for rank in range(ranks)]


def _plan(call: CallChunks, layers: Sequence[int], ran: Sequence[Ran]) -> Plan:
    stages = len(layers)
    orders, turns = orders_of_ranks(ran, stages)
    place = tuple(stage % len(ran) for stage in range(stages))
    return replace(call.plan(layers), place=place, turns=turns, orders=orders)


def _played(plan: Plan, table: Table, by: str) -> Plan:
    seconds = play(plan, table).seconds
    return replace(plan, predicted=Prediction(seconds, (0.0,) * plan.ranks, by))
