"""The order in which every stage runs the groups of a call: the best found, or Megatron's own.

The list scheduler orders the ops of chunks whose order is given; here the order of the groups is
sought besides. It is a pure function of seconds and bytes, bounded in work.

    given    F0 F1 B0 F2 B1 F3 B2 B3          1F1B in the caller's order
    found    F2 F0 B2 F1 B0 F3 B1 W2 B3 ...   small ones at both ends, W in the gaps
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from megatron_epp.ir import Op, Table, rules_for
from megatron_epp.planner.calls.call_cost import CallChunks, chunks_in
from megatron_epp.planner.chunks.chunking import backward_order, last_of_groups, starts_of
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.emit import merge_iw, orders_of_arrays
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policies, policy_of
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.warmup import group_by_group, shrinking_in_flight
from megatron_epp.planner.recompute.uniform import strict
from megatron_epp.sim.inputs import op_arrays

# Ops that a search may play; playing one takes most of a microsecond, and the loop waits meanwhile.
LEAST_OPS, MOST_OPS = 25_000, 400_000
SEARCH_FRACTION = 0.005  # of the call's own seconds
_OP_SECONDS = 8e-7
_ROUNDING = 1e-9


def search_ops(seconds: float) -> int:
    """How many ops a search may play for a call that takes about so long."""
    return int(min(MOST_OPS, max(LEAST_OPS, SEARCH_FRACTION * seconds / _OP_SECONDS)))


def problem_of_call(call: CallChunks, table: Table, budget: np.ndarray) -> ScheduleProblem:
    """The ops of ``call`` where stages have ``budget`` [stages] for its chunks."""
    ops, chunking = op_arrays(table, call.loads, rules_for(False)), call.chunking
    return ScheduleProblem(
        ops, chunking.backward, chunking.last_of_group, np.asarray(budget, float)
    )


def arranged(problem: ScheduleProblem, order: Sequence[int], sizes: np.ndarray) -> ScheduleProblem:
    """``problem`` with its groups in ``order``; how slices are tied is in the bytes already."""
    chunks, ops = chunks_in(order, sizes), problem.ops
    starts = starts_of(sizes[list(order)])
    return dataclasses.replace(
        problem,
        ops=ops._replace(
            seconds=np.ascontiguousarray(ops.seconds[..., chunks]),
            link_seconds=np.ascontiguousarray(ops.link_seconds[..., chunks]),
            moved_bytes=np.ascontiguousarray(ops.moved_bytes[..., chunks]),
        ),
        backward_order=backward_order(starts),
        last_of_group=last_of_groups(starts),
    )


@dataclass(frozen=True, slots=True)
class OrderedGroups:
    """Groups in the ``order`` of their forwards, and the ``schedule`` of ``problem``, in which they
    are so arranged. policy: by which it was found."""

    order: tuple[int, ...]
    problem: ScheduleProblem
    policy: PolicyParams | Policy
    schedule: Schedule

    @property
    def seconds(self) -> float:
        return self.schedule.seconds

    def ops(self, sizes: np.ndarray) -> tuple[tuple[Op, ...], ...]:
        """The ops of every stage, with the caller's numbers of chunks."""
        kinds, chunks = self.schedule.kinds, self.schedule.chunks
        if self.policy.split:
            kinds = merge_iw(self.schedule, self.problem)
        return orders_of_arrays(kinds, chunks_in(self.order, sizes)[chunks])


def call_order(problem: ScheduleProblem, sizes: np.ndarray) -> OrderedGroups:
    """1F1B in the caller's order; where there is one stage, group by group."""
    limit = (shrinking_in_flight if problem.stages > 1 else group_by_group)(sizes, problem.stages)
    played = list_schedule(problem, strict(limit))
    return OrderedGroups(tuple(range(len(sizes))), problem, PolicyParams(strict=True), played)


def best_order(
    problem: ScheduleProblem,
    sizes: np.ndarray,
    split: bool,
    reorder: bool,
    ops: int = MOST_OPS,
    budgets: Iterable[np.ndarray] = (),
) -> OrderedGroups | None:
    """The fastest order found that holds at most the problem's budget; None where none does.

    split     backwards may be split into I and W
    reorder   groups may run in another order than the caller's
    ops       how many the search may play
    budgets   rising ones [stages] instead of the problem's: the last is what may be held
    """
    # Policies that tell orders apart, and those that the best is played by.
    few = [PolicyParams(strict=True), PolicyParams(strict=False)]
    few += [PolicyParams(False, True, 4.0, 0.6)] if split else []
    every = list(dict.fromkeys([*policies(False, many=True), *policies(split, many=False)]))
    # One order at least is played by every policy: the first may not fit.
    left = max(ops, 3 * len(every) * problem.stages * problem.chunks)
    search = GroupSearch(problem, sizes, left, _in_flight)
    for _ in search.within(budgets):
        search.play(range(len(sizes)), every)
        if reorder:
            for order in orders_worth_playing(problem, sizes):
                search.play(order, few)
            if search.best is not None:
                search.play(search.best.order, every)
                search.climb()
    return search.best


def _in_flight(problem: ScheduleProblem, sizes: np.ndarray) -> Callable[[PolicyParams], Policy]:
    limit = shrinking_in_flight(sizes, problem.stages)
    return lambda params: policy_of(params, problem, sizes, limit)


class GroupSearch[Chosen: PolicyParams | Policy]:
    """``best``: the fastest order of groups of ``sizes`` played that fits. left: ops that may be
    played still; policies_for (problem, sizes): what a chosen policy is in an order."""

    def __init__(
        self,
        problem: ScheduleProblem,
        sizes: np.ndarray,
        left: int,
        policies_for: Callable[[ScheduleProblem, np.ndarray], Callable[[Chosen], Policy]],
    ):
        self.problem, self.sizes, self.left = problem, sizes, left
        self.policies_for = policies_for
        self.best: OrderedGroups | None = None
        self.policy: Chosen | None = None  # of the best

    def within(self, budgets: Iterable[np.ndarray]) -> Iterator[None]:
        """Search within rising budgets, with as many ops for each; without any, the problem's own.
        What was found within a smaller one stays unless it is beaten."""
        ops = self.left
        for budget in list(budgets) or [self.problem.headroom_bytes]:
            self.problem, self.left = dataclasses.replace(self.problem, headroom_bytes=budget), ops
            yield

    def play(self, order: Sequence[int], by: Sequence[Chosen]) -> bool:
        """Play ``order``; whether it is the best so far."""
        better = False
        problem = arranged(self.problem, order, self.sizes)
        policy_in = self.policies_for(problem, self.sizes[list(order)])
        for policy in by:
            if self.left <= 0:
                break
            self.left -= problem.stages * problem.chunks * (3 if policy.split else 2)
            played = list_schedule(problem, policy_in(policy))
            if not np.isfinite(played.seconds) or played.over_bytes > 0:
                continue
            if self.best is None or played.seconds < self.best.seconds * (1 - _ROUNDING):
                self.best = OrderedGroups(tuple(order), problem, policy, played)
                self.policy, better = policy, True
        return better

    def climb(self) -> None:
        """Swap two groups of the best, or move one, as long as that pays and work is left."""
        random, since = Random(0), 0
        while self.best is not None and self.left > 0 and since < 4 * len(self.best.order):
            order = list(self.best.order)
            if len(order) < 3 or self.policy is None:
                return
            one, other = random.sample(range(len(order)), 2)
            if random.random() < 0.5:
                order[one], order[other] = order[other], order[one]
            else:
                order.insert(other, order.pop(one))
            since = 0 if self.play(order, [self.policy]) else since + 1


def orders_worth_playing(problem: ScheduleProblem, sizes: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Orders of the groups worth playing besides the given one: by size, the large ones in the
    middle."""
    seconds = (problem.ops.seconds[F] + problem.ops.seconds[B]).sum(axis=0)
    total = np.add.reduceat(seconds, np.cumsum(sizes) - sizes)
    rising = [int(g) for g in np.argsort(total, kind="stable")]
    yield tuple(rising)
    yield tuple(reversed(rising))
    yield (*rising[::2], *reversed(rising[1::2]))  # small ones at both ends
    yield (*reversed(rising[1::2]), *rising[::2])[::-1]
    yield (rising[0], *reversed(rising[1:]))  # a small one first, then the largest
    if len(sizes) > 2:
        yield (rising[1], *reversed(rising[2:]), rising[0])


def forward_order(seconds_SC: np.ndarray) -> tuple[int, ...]:
    """The best order of a pass of forwards found, alike on all stages.

    A pipeline of forwards is a flow shop: what counts is which chunks come first and last.
    """
    rising = [int(c) for c in np.argsort(seconds_SC.sum(0), kind="stable")]
    as_called = tuple(range(seconds_SC.shape[1]))
    there_and_back = (*rising[::2], *reversed(rising[1::2]))
    orders = (as_called, _johnson(seconds_SC), there_and_back, tuple(rising))
    return min(orders, key=lambda order: round(flow_seconds(seconds_SC, order), 12))


def _johnson(seconds_SC: np.ndarray) -> tuple[int, ...]:
    """Johnson's rule, the best order of two stages: those that pass the first one faster come
    first, the shortest of them first, the others by how long the last stage takes, falling."""
    first, last = seconds_SC[0], seconds_SC[-1]
    early = [c for c in range(len(first)) if first[c] < last[c]]
    late = [c for c in range(len(first)) if first[c] >= last[c]]
    return (*sorted(early, key=lambda c: first[c]), *sorted(late, key=lambda c: -last[c]))


def flow_seconds(seconds_SC: np.ndarray, order: Sequence[int]) -> float:
    done = np.zeros(seconds_SC.shape[0])
    for chunk in order:
        before = 0.0
        for stage, seconds in enumerate(seconds_SC[:, chunk]):
            before = done[stage] = max(done[stage], before) + seconds
    return float(done[-1])
