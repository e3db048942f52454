"""List scheduling: whenever a rank is free, it runs the op that its policy prefers.

On every stage, forwards run in chunk order and backwards in backward order. A policy therefore
chooses between three ops: the next F, the next B (or I), and the oldest waiting W. If several
stages of a rank can run an F, the rank takes the last of these stages, or the first one if
``Policy.deep`` is False. For B, H, W and G it takes the first stage that can run the op. Each op
allocates and frees bytes of its rank, as the rule table (ir.rules) defines. An F waits if it would
leave too little memory for the rank's backwards. If no rank can run an op within its memory, an F
exceeds it.

With vocabulary parallelism, an H runs as soon as its rank is free and its input has arrived. The H
of the same chunk on later stages wait for this H, and the last stage's B waits for all of them. A
G fills gaps like a W, and has priority in the same cases.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_epp.planner.order.compiled import (
    G,
    Problem,
    replay_of,
    schedule_with,
    strict_orders,
)
from megatron_epp.planner.order.problem import ScheduleProblem

# With unsplit backwards only G fills gaps. HELD_HEADS limits the waiting G, in mean seconds of one
# G. A G may overrun a gap by the fraction HEAD_PATIENCE of itself. Chosen by hand.
HELD_HEADS = 4
HEAD_PATIENCE = 0.6


class Policy(NamedTuple):
    """Preferences of each rank; numbers of forwards and backwards are totals of its stages.

    A policy with least = first = most is strict. With unsplit backwards, it fixes the order of ops:
    memory is measured, but delays no op. Any policy with unsplit backwards uses HELD_HEADS and
    HEAD_PATIENCE for G, in place of ``held_seconds`` and ``patience``.

    Attributes:
        least: [ranks, k] number of forwards that must precede backward k of the rank.
        first: [ranks, k] after k backwards, F precedes B until this number of forwards has run.
        most: [ranks, k] after k backwards, the rank may run at most this number of forwards.
        split: whether to run I and W instead of B, except in a rank's first ``unsplit`` backwards.
        held_seconds: W and G get priority if more than these seconds of W and G wait on the rank.
        patience: a W or G fills a gap only if at most this fraction of its time would extend
            beyond the rank's next input.
        deep: whether to prefer the F of a rank's last stage to the F of its first stage.
        unsplit: number of a rank's first backwards that run as B although ``split`` is set.
    """

    least: np.ndarray
    first: np.ndarray
    most: np.ndarray
    split: bool = False
    held_seconds: float = np.inf
    patience: float = 0.0
    deep: bool = True
    unsplit: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ops of each rank, in order, and their times.

    Attributes:
        seconds: seconds of the iteration; infinite if the ops cannot all run.
        peak_bytes: [ranks] peak bytes without model states.
        over_bytes: maximum over the ranks of the bytes above the budget, at least 0.
        kinds: [ranks, ops] op kinds as codes (ir.KIND_CODE); -1: no op.
        chunks: [ranks, ops] chunks of the ops.
        stages: [ranks, ops] stages of the ops; shape [ranks, 0] if stage i is on rank i.
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
    if work.vocabulary_parallel and not policy.split:
        held_seconds = HELD_HEADS * float(work.ops.seconds[G].mean())
        policy = policy._replace(held_seconds=held_seconds, patience=HEAD_PATIENCE)
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
        work.vocabulary_parallel,
    )
    seconds, peaks, *ops = schedule_with(problem, policy)
    over = max(0.0, float((peaks - work.headroom_bytes).max()))
    return Schedule(seconds, peaks, over, *ops)
