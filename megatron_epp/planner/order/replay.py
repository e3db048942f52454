"""Orders kept while the work changes: what they take with other durations and bytes.

A list schedule answers every change of recompute with another order, and the order that an earlier
one led to is at times the better for the new work as well.

The simulator's loop (sim.engine) tells the same and more, but takes three to eight times as long
(4 to 32 stages; scripts/bench/replay_time.py), and a search plays thousands of orders. So this
one stays; tests/planner/test_judges.py holds the two equal to the last bit of time.
"""

from megatron_epp.planner.order.compiled import replay_of
from megatron_epp.planner.order.list_scheduler import Schedule
from megatron_epp.planner.order.problem import ScheduleProblem


def replayed(work: ScheduleProblem, schedule: Schedule) -> Schedule:
    """The orders of ``schedule`` with ``work`` of the same chunks."""
    seconds, peaks, start, stop = replay_of(
        work.ops.seconds,
        work.ops.link_seconds,
        work.ops.latency,
        work.ops.moved_bytes,
        schedule.kinds,
        schedule.chunks,
    )
    over = max(0.0, float((peaks - work.headroom_bytes).max()))
    kept = schedule.kinds, schedule.chunks, schedule.stages
    return Schedule(seconds, peaks, over, *kept, start, stop)
