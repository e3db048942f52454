"""Replay: simulation of a given order of ops with new times and bytes.

After every change of recompute, list scheduling may return another order, but the earlier order is
sometimes better for the new times.
"""

import numpy as np

from megatron_epp.planner.order.list_scheduler import Schedule
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.sim.engine import Orders, run
from megatron_epp.sim.rule_arrays import needs_for


def replayed(work: ScheduleProblem, schedule: Schedule) -> Schedule:
    """Return ``schedule`` in the same order, with the times and peaks of ``work`` (same chunks)."""
    place = np.array(work.place or range(work.stages))
    ran = schedule.kinds >= 0
    on_stage = schedule.stages if work.place else np.broadcast_to(place[:, None], ran.shape)
    offset = np.concatenate(([0], np.cumsum(ran.sum(axis=1))))
    chunks, stages = (of[ran].astype(np.int64) for of in (schedule.chunks, on_stage))
    arrays = work.ops._replace(resident=np.zeros(work.stages))
    orders = Orders(schedule.kinds[ran], chunks, stages, offset, place)
    played = run(orders, arrays, needs_for(work.vocabulary_parallel))
    start, stop = np.zeros(ran.shape), np.zeros(ran.shape)
    start[ran], stop[ran] = played.start, played.stop
    over = max(0.0, float((played.peak - work.headroom_bytes).max()))
    kept = schedule.kinds, schedule.chunks, schedule.stages
    return Schedule(played.seconds, played.peak, over, *kept, start, stop)
