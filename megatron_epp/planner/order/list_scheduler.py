"""List scheduling: whenever a rank is free, it runs the op that its policy prefers.

Forwards run in chunk order and backwards in theirs on every stage. A policy therefore chooses
between three ops: the next F, the next B (or I), and the oldest waiting W. A rank with several
stages takes the F of its last stage that can run one, or of its first (without ``deep``). It takes
B, H, W or G of its first such stage. Memory is charged to the rank by the rule table. An F waits if
the rank could not run its backwards afterwards.

With vocabulary parallelism an H runs as soon as its stage is free and its input is there. The other
stages' H of that chunk wait for it, and the last stage's B for all of them. G fills gaps as W does,
and has priority when W has.
"""

from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.order.compiled import (
    G,
    PolicyArrays,
    Problem,
    replay_of,
    schedule_with,
    strict_orders,
)
from megatron_epp.planner.order.problem import ScheduleProblem

# With unsplit backwards only G fills gaps. At most this many wait, in mean seconds of one G, and a
# gap may be overrun by this fraction of one. Chosen by hand.
HELD_HEADS = 4
HEAD_PATIENCE = 0.6


@dataclass(frozen=True, slots=True)
class Policy:
    """Preferences of a rank, in terms of the forwards and backwards of all its stages.

    A strict order has least = first = most. Without a split nothing is left to choose then, so
    memory is only measured, and holds no op back. With unsplit backwards, HELD_HEADS and
    HEAD_PATIENCE apply to G in place of ``held_seconds`` and ``patience``.

    Attributes:
        least: [ranks, k] forwards that must precede backward k of the rank.
        first: [ranks, k] after k backwards, an F precedes a B up to this many forwards.
        most: [ranks, k] after k backwards, no F runs beyond this many forwards.
        split: whether to run I and W instead of B.
        held_seconds: a W or G has priority if this much of their work waits on the stage.
        patience: a W or G starts only if it ends at most this fraction of itself after the next
            awaited input.
        deep: whether to prefer the F of the last stage of a rank to that of the first.
    """

    least: np.ndarray
    first: np.ndarray
    most: np.ndarray
    split: bool = False
    held_seconds: float = np.inf
    patience: float = 0.0
    deep: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ops of each rank and their times; ranks with fewer stages have padding at the end.

    Attributes:
        seconds: time of the iteration.
        peak_bytes: [ranks] bytes beyond the states.
        over_bytes: most bytes of any rank above its budget, at least 0.
        kinds: [ranks, ops] codes of kinds (ir.KIND_CODE).
        chunks: [ranks, ops] chunks.
        stages: [ranks, ops] stages; no columns if stage i is on rank i.
        start: [ranks, ops] start times in seconds.
        stop: [ranks, ops] end times in seconds.
    """

    seconds: float
    peak_bytes: np.ndarray
    over_bytes: float
    kinds: np.ndarray
    chunks: np.ndarray
    stages: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def list_schedule(work: ScheduleProblem, policy: Policy) -> Schedule:
    """Return the schedule of ``policy``, with its times and memory peaks."""
    fixed = policy.least is policy.most and not policy.split
    if fixed and not work.vocabulary_parallel and not work.place:
        # Nothing is left to choose, and replaying is several times faster than the loop below.
        kinds, chunks, complete = strict_orders(
            policy.least, work.backward_order, work.last_of_group
        )
        if complete:
            ops = work.ops
            seconds, peaks, start, stop = replay_of(
                ops.seconds, ops.link_seconds, ops.latency, ops.moved_bytes, kinds, chunks
            )
            over = max(0.0, float((peaks - work.headroom_bytes).max()))
            stages = np.zeros((len(kinds), 0), np.int32)
            return Schedule(seconds, peaks, over, kinds, chunks, stages, start, stop)
    held_seconds, patience = policy.held_seconds, policy.patience
    if work.vocabulary_parallel and not policy.split:
        held_seconds = HELD_HEADS * float(work.ops.seconds[G].mean())
        patience = HEAD_PATIENCE
    rank_of = np.array(work.place or range(work.stages), np.int64)
    problem = Problem(
        work.ops.seconds,
        work.ops.link_seconds,
        work.ops.latency,
        work.ops.moved_bytes,
        work.backward_order,
        work.last_of_group,
        np.full(len(work.headroom_bytes), np.inf) if fixed else work.headroom_bytes,
        rank_of,
        np.argsort(rank_of, kind="stable"),
        bool(work.place),
    )
    limits = PolicyArrays(
        policy.least,
        policy.first,
        policy.most,
        policy.split,
        work.vocabulary_parallel,
        held_seconds,
        patience,
        policy.deep,
    )
    seconds, peaks, *ops = schedule_with(problem, limits)
    over = max(0.0, float((peaks - work.headroom_bytes).max()))
    return Schedule(seconds, peaks, over, *ops)
