"""In which order every stage runs the chunks of a call: the best found, or Megatron's own.

A *group* is what one micro-batch became: one chunk, or several where its documents are cut. Groups
may run in any order, the chunks of a group run forward as they stand and backward in reverse, and
no backward of a group comes before its last forward (its loss). The search is a pure function of
seconds and sizes, bounded in work.

    given    F0 F1 B0 F2 B1 F3 B2 B3          1F1B in the caller's order
    found    F2 F0 B2 F1 B0 F3 B1 W2 B3 ...   small ones at both ends, W in the gaps
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from megatron_epp.ir import KIND_CODE, OF_LAYERS, Kind, Op
from megatron_epp.planner.order.compiled import B, F, I, W
from megatron_epp.planner.order.emit import NOTHING, merge_iw
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policy_of
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.planner.order.replay import replayed
from megatron_epp.planner.order.warmup import shrinking
from megatron_epp.sim.engine import OpArrays

# What I leaves for W over what F leaves for B: inputs and output gradients of the linears alone.
WEIGHT_INPUT_SHARE = 0.6
# Ops that a search may play; playing one takes most of a microsecond, and the loop waits meanwhile.
LEAST_OPS, MOST_OPS = 12_000, 400_000
SEARCH_SHARE = 0.005  # of the call's own seconds
_OP_SECONDS = 8e-7
_ROUNDING = 1e-9

_WHOLE = (PolicyParams(strict=True), *(PolicyParams(strict=False, lead=n) for n in (0, 1, 2, 4)))
_SPLIT = tuple(
    PolicyParams(False, True, held, patience)
    for held, patience in ((1.0, 0.3), (4.0, 0.6), (np.inf, 0.8))
)


@dataclass(frozen=True, slots=True)
class Work:
    """Chunks of a call in the caller's order.

    seconds   [kinds, stages, chunks]
    rows      [chunks] tokens, by which memory is counted; or [stages, chunks] bytes
    sizes     [groups] chunks of every group; they add up to all chunks
    """

    seconds: np.ndarray
    rows: np.ndarray
    sizes: np.ndarray

    @property
    def stages(self) -> int:
        return self.seconds.shape[1]

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.sizes)))

    def chunks(self, order: Sequence[int]) -> np.ndarray:
        """The chunks with their groups in ``order``."""
        starts = self.starts
        return np.concatenate([np.arange(starts[g], starts[g + 1]) for g in order])


@dataclass(frozen=True, slots=True)
class Ordered:
    """orders[s]: the ops of stage s. seconds: predicted. note: how it was found. recompute[s][c]:
    letters of the layers of chunk c there; (): none is recomputed."""

    orders: tuple[tuple[Op, ...], ...]
    seconds: float
    note: str
    recompute: tuple[tuple[str, ...], ...] = ()


def given_order(whole: Work) -> Ordered:
    """1F1B in the caller's order."""
    played = _given(whole)
    order = np.arange(len(whole.rows))
    return Ordered(_orders(played, order), played.seconds, "as given, 1F1B")


def search_ops(seconds: float) -> int:
    """What a search may play for a call that takes about so long."""
    return int(min(MOST_OPS, max(LEAST_OPS, SEARCH_SHARE * seconds / _OP_SECONDS)))


def best_order(
    work: Work, room_rows: np.ndarray, split: bool, reorder: bool, ops: int = MOST_OPS
) -> Ordered | None:
    """The fastest order found that holds at most ``room_rows`` [stages]; None where none does.

    split     backwards may be split into I and W
    reorder   groups may run in another order than the caller's
    ops       how many the search may play
    """
    search = _Search(work, room_rows, (*_WHOLE, *_SPLIT) if split else _WHOLE, ops)
    given = tuple(range(len(work.sizes)))
    search.play(given)
    if reorder:
        # Which order is good depends little on the policy: starts are told apart by a few.
        few = (*_WHOLE[:2], _SPLIT[1]) if split else _WHOLE[:3]
        for order in _starts(work):
            search.play(order, few)
        search.play_best()
        search.climb()
    return search.best


class _Search:
    def __init__(
        self, work: Work, room_rows: np.ndarray, policies: Sequence[PolicyParams], ops: int
    ):
        self.work, self.room_rows, self.policies = work, room_rows, policies
        # One order at least is played by every policy: the first may not fit.
        self.left = max(ops, 3 * len(policies) * work.stages * work.seconds.shape[2])
        self.best: Ordered | None = None
        self._best_order: tuple[int, ...] | None = None
        self._best_policy: PolicyParams | None = None

    def play(self, order: Sequence[int], policies: Sequence[PolicyParams] | None = None) -> bool:
        """Play ``order``; whether it is the best so far."""
        better = False
        problem = _problem(self.work, order, self.room_rows)
        sizes = self.work.sizes[list(order)]
        law = shrinking(sizes, self.work.stages)
        for policy in self.policies if policies is None else policies:
            if self.left <= 0:
                break
            self.left -= problem.stages * problem.chunks * (3 if policy.split else 2)
            played = list_schedule(problem, policy_of(policy, problem, sizes, law))
            if not np.isfinite(played.seconds) or played.over_bytes > 0:
                continue
            if self.best is None or played.seconds < self.best.seconds * (1 - _ROUNDING):
                merged = policy.split and merge_iw(played.kinds, played.chunks, problem)
                orders = _orders(played, self.work.chunks(order), merged)
                self.best = Ordered(orders, played.seconds, str(policy))
                self._best_order, self._best_policy = tuple(order), policy
                better = True
        return better

    def play_best(self) -> None:
        """Play the best order by all policies."""
        if self._best_order is not None:
            self.play(self._best_order)

    def climb(self) -> None:
        """Swap two groups of the best, or move one, as long as that pays and work is left."""
        if self._best_order is None or len(self._best_order) < 3:
            return
        random = Random(0)
        since = 0
        while self.left > 0 and since < 4 * len(self._best_order):
            assert self._best_policy is not None
            order = list(self._best_order)
            one, other = random.sample(range(len(order)), 2)
            if random.random() < 0.5:
                order[one], order[other] = order[other], order[one]
            else:
                order.insert(other, order.pop(one))
            since = 0 if self.play(order, [self._best_policy]) else since + 1


def _starts(work: Work) -> Iterator[tuple[int, ...]]:
    """Orders of the groups worth playing besides the given one: by size, the large ones in the
    middle."""
    count = len(work.sizes)
    total = np.add.reduceat((work.seconds[F] + work.seconds[B]).sum(0), work.starts[:-1])
    rising = [int(g) for g in np.argsort(total, kind="stable")]
    yield tuple(rising)
    yield tuple(reversed(rising))
    yield (*rising[::2], *reversed(rising[1::2]))  # small ones at both ends
    yield (*reversed(rising[1::2]), *rising[::2])[::-1]
    yield (rising[0], *reversed(rising[1:]))  # a small one first, then the largest
    if count > 2:
        yield (rising[1], *reversed(rising[2:]), rising[0])


def _given(whole: Work) -> Schedule:
    problem = _problem(whole, range(len(whole.sizes)), np.full(whole.stages, np.inf))
    law = shrinking(whole.sizes, whole.stages)
    return list_schedule(problem, Policy(law, law, law))


def _problem(work: Work, order: Sequence[int], room_rows: np.ndarray) -> ScheduleProblem:
    chunks = work.chunks(order)
    sizes = work.sizes[list(order)]
    rows_SC = np.broadcast_to(work.rows, (work.stages, len(chunks)))[:, chunks].astype(float)
    moved = np.zeros((len(OF_LAYERS), 2, *rows_SC.shape))
    moved[F, 0] = moved[B, 1] = moved[I, 1] = rows_SC
    moved[I, 0] = moved[W, 1] = WEIGHT_INPUT_SHARE * rows_SC
    starts = np.concatenate(([0], np.cumsum(sizes)))
    group = np.repeat(np.arange(len(sizes)), sizes)
    count = len(chunks)
    alone = np.full(count, -1, dtype=np.int64)
    ops = OpArrays(
        np.ascontiguousarray(work.seconds[:, :, chunks]),
        np.zeros((2, max(work.stages - 1, 1), count)),
        0.0,
        moved,
        np.zeros(work.stages),
        alone,
        alone,
    )
    return ScheduleProblem(
        ops=ops,
        backward_order=starts[group] + starts[group + 1] - 1 - np.arange(count),
        last_of_group=np.repeat(starts[1:] - 1, sizes),
        room_bytes=np.asarray(room_rows, float),
    )


def _orders(
    played: Schedule, chunks: np.ndarray, kinds: np.ndarray | bool = False
) -> tuple[tuple[Op, ...], ...]:
    """As ops; ``chunks[n]`` is what the n-th is called outside, ``kinds`` stand in for the played
    ones."""
    codes = played.kinds if isinstance(kinds, bool) else kinds
    return tuple(
        tuple(
            Op(OF_LAYERS[kind], int(chunks[chunk]))
            for kind, chunk in zip(*row, strict=True)
            if kind != NOTHING
        )
        for row in zip(codes.tolist(), played.chunks.tolist(), strict=True)
    )


def retimed(work: Work, found: Ordered) -> Ordered:
    """The orders of ``found``, where ``work`` says what their ops take now."""
    shape = work.stages, max(map(len, found.orders))
    kinds, chunks = np.full(shape, NOTHING, dtype=np.int8), np.zeros(shape, dtype=np.int64)
    for stage, ops in enumerate(found.orders):
        kinds[stage, : len(ops)] = [KIND_CODE[op.kind] for op in ops]
        chunks[stage, : len(ops)] = [op.chunk for op in ops]
    problem = _problem(work, range(len(work.sizes)), np.full(work.stages, np.inf))
    nothing = np.zeros(work.stages)
    orders = Schedule(0.0, nothing, 0.0, kinds, chunks, nothing, nothing)
    return replace(found, seconds=replayed(problem, orders).seconds)


def forward_orders(seconds_SC: np.ndarray, reorder: bool) -> tuple[tuple[Op, ...], float, float]:
    """The best order of a pass of forwards found, alike on all stages; its seconds, and those of
    the caller's.

    A pipeline of forwards is a flow shop: what counts is which chunks come first and last.
    """
    count = seconds_SC.shape[1]
    given = tuple(range(count))
    best, given_takes = given, flow_seconds(seconds_SC, given)
    takes = given_takes
    if reorder:
        rising = [int(c) for c in np.argsort(seconds_SC.sum(0), kind="stable")]
        for order in (_johnson(seconds_SC), (*rising[::2], *reversed(rising[1::2])), rising):
            tried = flow_seconds(seconds_SC, order)
            if tried < takes * (1 - _ROUNDING):
                best, takes = tuple(order), tried
    return tuple(Op(Kind.FORWARD, c) for c in best), takes, given_takes


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
