"""Order of a call's groups (micro-batches): found by a search, or Megatron's order.

For a given order of the chunks, the list scheduler orders their ops. This module also searches the
order of the groups. The result depends only on seconds and bytes, and the search is bounded.

    caller's   F0 F1 B0 F2 B1 F3 B2 B3          1F1B in the caller's order
    searched   F2 F0 B2 F1 B0 F3 B1 W2 B3 ...   small groups at both ends, W in the gaps
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from megatron_epp.ir import Op, Table, rules_for
from megatron_epp.planner.calls.call_cost import CallChunks, chunks_in
from megatron_epp.planner.chunks.chunking import backward_order, last_of_groups, starts_of
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.emit import orders_of_arrays
from megatron_epp.planner.order.list_scheduler import Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policies, policy_of
from megatron_epp.planner.order.problem import ScheduleProblem, ops_of
from megatron_epp.planner.order.replay import merged
from megatron_epp.planner.order.warmup import group_by_group, shrinking_in_flight
from megatron_epp.planner.recompute.uniform import strict
from megatron_epp.sim.inputs import op_arrays

# Bounds on the number of ops that a search simulates. Each op takes most of a microsecond, and the
# training loop waits for the search.
LEAST_OPS, MOST_OPS = 25_000, 400_000
SEARCH_FRACTION = 0.005  # of the call's own seconds
_OP_SECONDS = 8e-7
_ROUNDING = 1e-9


def search_ops(seconds: float) -> int:
    """Return the number of ops that a search may simulate for a call of about ``seconds``."""
    return int(min(MOST_OPS, max(LEAST_OPS, SEARCH_FRACTION * seconds / _OP_SECONDS)))


def problem_of_call(call: CallChunks, table: Table, budget: np.ndarray) -> ScheduleProblem:
    """Return the scheduling problem of ``call`` with a memory ``budget`` [stages]."""
    ops, chunking = op_arrays(table, call.loads, rules_for(False)), call.chunking
    return ScheduleProblem(
        ops, chunking.backward, chunking.last_of_group, np.asarray(budget, float)
    )


def arranged(problem: ScheduleProblem, order: Sequence[int], sizes: np.ndarray) -> ScheduleProblem:
    """Return ``problem`` with its groups (micro-batches) in ``order``.

    ``sizes`` contains the number of chunks of every group. The seconds and bytes of a chunk do not
    change, because dependencies between slices stay within a group.
    """
    starts = starts_of(sizes[list(order)])
    return dataclasses.replace(
        problem,
        ops=ops_of(problem.ops, chunks_in(order, sizes)),
        backward_order=backward_order(starts),
        last_of_group=last_of_groups(starts),
    )


@dataclass(frozen=True, slots=True)
class OrderedGroups:
    """Groups (micro-batches) in a certain order, and their schedule.

    Attributes:
        order: indices of the groups in the order of their forwards.
        problem: the scheduling problem with the groups in this order.
        policy: policy that found the schedule.
        schedule: the schedule.
    """

    order: tuple[int, ...]
    problem: ScheduleProblem
    policy: PolicyParams
    schedule: Schedule

    @property
    def seconds(self) -> float:
        """Seconds of the schedule."""
        return self.schedule.seconds

    def ops(self, sizes: np.ndarray) -> tuple[tuple[Op, ...], ...]:
        """Return the ops of every stage, with the caller's chunk indices."""
        chunks = chunks_in(self.order, sizes)[self.schedule.chunks]
        return orders_of_arrays(self.schedule.kinds, chunks)


def call_order(problem: ScheduleProblem, sizes: np.ndarray) -> OrderedGroups:
    """Return 1F1B in the caller's order; a single stage runs one group (micro-batch) at a time."""
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
    """Return the fastest order found that fits in the memory budget, or None if none fits.

    Args:
        problem: the scheduling problem in the caller's order.
        sizes: [groups] number of chunks of every group (micro-batch).
        split: whether backwards may be split into I and W.
        reorder: whether groups may run in another order.
        ops: number of ops that the search may simulate. If it does not suffice to try every policy,
            the search simulates more.
        budgets: ascending memory budgets [stages], which are searched in turn. The result fits in
            the last one. If empty, the problem's own budget is used.
    """
    # ``few`` policies compare orders; ``every`` policy is tried on the best order.
    few = [PolicyParams(strict=True), PolicyParams(strict=False)]
    few += [PolicyParams(False, True, 4.0, 0.6)] if split else []
    every = list(dict.fromkeys([*policies(False, many=True), *policies(split, many=False)]))
    # Enough ops for every policy on at least one order: the first policies may not fit.
    left = max(ops, 3 * len(every) * problem.stages * problem.chunks)
    search = GroupSearch(problem, sizes, left)
    for _ in search.within(budgets):
        search.play(range(len(sizes)), every)
        if reorder:
            for order in orders_worth_playing(problem, sizes):
                search.play(order, few)
            if search.best is not None:
                search.play(search.best.order, every)
                search.climb()
    return search.best


class GroupSearch:
    """Search over the orders of groups; ``best`` is the fastest order that fits.

    Args:
        problem: the scheduling problem in the caller's order.
        sizes: [groups] number of chunks of every group (micro-batch).
        left: number of ops that may still be simulated.
    """

    def __init__(self, problem: ScheduleProblem, sizes: np.ndarray, left: int):
        self.problem, self.sizes, self.left = problem, sizes, left
        self.best: OrderedGroups | None = None

    def within(self, budgets: Iterable[np.ndarray]) -> Iterator[None]:
        """Set each of the ascending ``budgets`` in turn; the caller searches after each yield.

        Each of these searches may simulate ``left`` ops. The best order of a smaller budget stays
        ``best`` until a faster order is found. Without ``budgets``, the problem's budget is used.
        """
        ops = self.left
        for budget in list(budgets) or [self.problem.headroom_bytes]:
            self.problem, self.left = dataclasses.replace(self.problem, headroom_bytes=budget), ops
            yield

    def play(self, order: Sequence[int], by: Sequence[PolicyParams]) -> bool:
        """Simulate ``order`` with the policies of ``by``; return whether ``best`` has improved."""
        better = False
        problem = arranged(self.problem, order, self.sizes)
        sizes = self.sizes[list(order)]
        limit = shrinking_in_flight(sizes, problem.stages)
        for policy in by:
            if self.left <= 0:
                break
            self.left -= problem.stages * problem.chunks * (3 if policy.split else 2)
            played = list_schedule(problem, policy_of(policy, problem, limit))
            if policy.split:
                played = merged(problem, played)
            if not np.isfinite(played.seconds) or played.over_bytes > 0:
                continue
            if self.best is None or played.seconds < self.best.seconds * (1 - _ROUNDING):
                self.best, better = OrderedGroups(tuple(order), problem, policy, played), True
        return better

    def climb(self) -> None:
        """Swap or move random groups of the best order, until no ops are left or nothing helps."""
        random, since = Random(0), 0
        while self.best is not None and self.left > 0 and since < 4 * len(self.best.order):
            order = list(self.best.order)
            if len(order) < 3:
                return
            one, other = random.sample(range(len(order)), 2)
            if random.random() < 0.5:
                order[one], order[other] = order[other], order[one]
            else:
                order.insert(other, order.pop(one))
            since = 0 if self.play(order, [self.best.policy]) else since + 1


def orders_worth_playing(problem: ScheduleProblem, sizes: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yield orders that sort the groups by time; most have the longest groups in the middle."""
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
    """Return the fastest of several chunk orders of a forward-only pass, the same for all stages.

    ``seconds_SC`` [stages, chunks] are the seconds of the forwards. Such a pipeline is a flow shop:
    the first and the last chunks determine its idle time.
    """
    rising = [int(c) for c in np.argsort(seconds_SC.sum(0), kind="stable")]
    as_called = tuple(range(seconds_SC.shape[1]))
    there_and_back = (*rising[::2], *reversed(rising[1::2]))
    orders = (as_called, _johnson(seconds_SC), there_and_back, tuple(rising))
    return min(orders, key=lambda order: round(flow_seconds(seconds_SC, order), 12))


def _johnson(seconds_SC: np.ndarray) -> tuple[int, ...]:
    """Return the order of Johnson's rule, which is optimal for two stages.

    Chunks whose first stage is faster than their last stage run first, in ascending order of their
    time on the first stage. The other chunks follow, in descending order of their time on the last
    stage.
    """
    first, last = seconds_SC[0], seconds_SC[-1]
    early = [c for c in range(len(first)) if first[c] < last[c]]
    late = [c for c in range(len(first)) if first[c] >= last[c]]
    return (*sorted(early, key=lambda c: first[c]), *sorted(late, key=lambda c: -last[c]))


def flow_seconds(seconds_SC: np.ndarray, order: Sequence[int]) -> float:
    """Return the makespan of forwards that run in the same ``order`` on all stages."""
    done = np.zeros(seconds_SC.shape[0])
    for chunk in order:
        before = 0.0
        for stage, seconds in enumerate(seconds_SC[:, chunk]):
            before = done[stage] = max(done[stage], before) + seconds
    return float(done[-1])
