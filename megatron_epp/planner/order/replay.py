"""Replay: simulation of a given order of ops with new times and bytes.

After a change of recompute, list scheduling may return another order, but the earlier order is
sometimes better for the new times.

The simulator's loop (sim.engine) computes the same results and more, but takes three to eight times
as long (4 to 32 stages), and a search replays thousands of orders. Tests require both loops to
return exactly equal times (tests/planner/test_judges.py). If ranks have several stages, orders are
replayed by the simulator's loop.
"""

import dataclasses

import numpy as np

from megatron_epp.planner.order.compiled import GRADIENT, NOTHING, B, I, W, replay_of
from megatron_epp.planner.order.list_scheduler import Schedule
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.sim.engine import Orders, run
from megatron_epp.sim.rule_arrays import needs_for


def replayed(work: ScheduleProblem, schedule: Schedule) -> Schedule:
    """Return ``schedule`` in the same order, with the times and peaks of ``work`` (same chunks)."""
    seconds, peaks, start, stop = (
        _of_ranks(work, schedule)
        if work.place
        else replay_of(
            work.ops.seconds,
            work.ops.link_seconds,
            work.ops.latency,
            work.ops.moved_bytes,
            schedule.kinds,
            schedule.chunks,
        )
    )
    over = max(0.0, float((peaks - work.headroom_bytes).max()))
    kept = schedule.kinds, schedule.chunks, schedule.stages
    return Schedule(seconds, peaks, over, *kept, start, stop)


def merged(work: ScheduleProblem, schedule: Schedule) -> Schedule:
    """Return ``schedule`` with B in place of adjacent I and W wherever this delays no other op.

    B takes no more time than I and W, and holds no bytes until a W. But I sends its gradient before
    W runs, so B replaces them only if its gradient also arrives before the previous stage needs it.
    """
    kinds, chunks, seconds = schedule.kinds, schedule.chunks, work.ops.seconds
    stages = schedule.stages if work.place else np.indices(kinds.shape)[0]
    follows = (kinds[:, :-1] == I) & (kinds[:, 1:] == W) & (chunks[:, :-1] == chunks[:, 1:])
    rank, at = np.nonzero(follows & (stages[:, :-1] == stages[:, 1:]))
    s, c = stages[rank, at], chunks[rank, at]
    begin, backward = np.full(seconds.shape[1:], np.inf), (kinds == B) | (kinds == I)
    begin[stages[backward], chunks[backward]] = schedule.start[backward]
    arrival = schedule.start[rank, at] + seconds[B, s, c]
    arrival += work.ops.link_seconds[GRADIENT, s - 1, c] + work.ops.latency
    halves = seconds[I, s, c] + seconds[W, s, c]
    pays = seconds[B, s, c] <= halves * (1 + 1e-9)  # equal except for rounding
    chosen = pays & ((s == 0) | (arrival <= begin[s - 1, c]))
    if not chosen.any():
        return schedule
    kinds = kinds.copy()
    kinds[rank[chosen], at[chosen]], kinds[rank[chosen], at[chosen] + 1] = B, NOTHING
    return replayed(work, dataclasses.replace(schedule, kinds=kinds))


def _of_ranks(
    work: ScheduleProblem, schedule: Schedule
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds, peak bytes, start and stop of a replay if ranks have several stages."""
    ran = schedule.kinds >= 0
    offset = np.concatenate(([0], np.cumsum(ran.sum(axis=1))))
    chunks, stages = (of[ran].astype(np.int64) for of in (schedule.chunks, schedule.stages))
    orders = Orders(schedule.kinds[ran], chunks, stages, offset, np.array(work.place))
    arrays = work.ops._replace(resident=np.zeros(work.stages))
    played = run(orders, arrays, needs_for(work.vocabulary_parallel))
    start, stop = np.zeros(ran.shape), np.zeros(ran.shape)
    start[ran], stop[ran] = played.start, played.stop
    return played.seconds, played.peak, start, stop
