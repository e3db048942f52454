"""Orders kept while the work changes: what they take with other durations and bytes.

A list schedule answers every change of recompute with another order, and the order that an earlier
one led to is at times the better for the new work as well.

The simulator's loop (sim.engine) tells the same and more, but takes three to eight times as long
(4 to 32 stages; scripts/bench/replay_time.py), and a search plays thousands of orders. So this
one stays; tests/planner/test_judges.py holds the two equal to the last bit of time.
"""

import numpy as np
from numba import njit

from megatron_epp.planner.order.list_scheduler import Schedule
from megatron_epp.planner.order.problem import ScheduleProblem

# ir.KIND_CODE and ir.Payload, in this file: compiled code is cached by file (see list_scheduler).
F, W, H, G = 0, 3, 4, 5
ACTIVATION, GRADIENT, HEAD = 0, 1, 2


def replayed(work: ScheduleProblem, schedule: Schedule) -> Schedule:
    """The orders of ``schedule`` with ``work`` of the same chunks."""
    seconds, peaks, start, stop = _replay(
        work.ops.seconds,
        work.ops.link_seconds,
        work.ops.latency,
        work.ops.moved_bytes,
        schedule.kinds,
        schedule.chunks,
    )
    over = max(0.0, float((peaks - work.budget_bytes).max()))
    return Schedule(seconds, peaks, over, schedule.kinds, schedule.chunks, start, stop)


@njit(cache=True)
def _replay(seconds, link_seconds, latency, moves, kinds, chunks):
    # An order that ran once runs again, so what a stage needs of itself lies behind it: only
    # messages have to be waited for.
    stages, count = seconds.shape[1:]
    per_stage = kinds.shape[1]
    start, stop = np.zeros((stages, per_stage)), np.zeros((stages, per_stage))
    arrival_f = np.full((stages, count), np.inf)
    arrival_b = np.full((stages, count), np.inf)
    arrival_f[0, :] = 0.0
    arrival_b[stages - 1, :] = 0.0
    head = len(seconds) > H
    arrival_h = np.full((stages if head else 0, count), np.inf)
    link_h = 0.0  # from the last stage to the first; of two stages it is the gradients'
    if head:
        arrival_b[stages - 1, :] = np.inf
    link_f, link_b = np.zeros(stages), np.zeros(stages)
    free, held, peak = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    at = np.zeros(stages, dtype=np.int64)
    left = stages * per_stage
    while left > 0:
        before = left
        for s in range(stages):
            while at[s] < per_stage:
                i = at[s]
                kind, c = kinds[s, i], chunks[s, i]
                ready = 0.0
                if kind == F:
                    ready = arrival_f[s, c]
                elif kind == H:
                    ready = arrival_h[s, c]
                elif kind != W and kind != G:
                    ready = arrival_b[s, c]
                if ready == np.inf:
                    break
                begin = max(free[s], ready)
                done = begin + seconds[kind, s, c]
                start[s, i], stop[s, i], free[s] = begin, done, done
                held[s] += moves[kind, 0, s, c]
                peak[s] = max(peak[s], held[s])
                held[s] -= moves[kind, 1, s, c]
                at[s] += 1
                left -= 1
                if kind == F and s + 1 < stages:
                    link_f[s] = max(done, link_f[s]) + link_seconds[ACTIVATION, s, c]
                    arrival_f[s + 1, c] = link_f[s] + latency
                elif kind == F and head:
                    busy = link_b[0] if stages == 2 else link_h
                    sent = max(done, busy) + link_seconds[HEAD, stages - 1, c]
                    if stages == 2:
                        link_b[0] = sent
                    else:
                        link_h = sent
                    arrival_h[0, c] = sent + latency
                elif kind == H and s + 1 < stages:
                    link_f[s] = max(done, link_f[s]) + link_seconds[HEAD, s, c]
                    arrival_h[s + 1, c] = link_f[s] + latency
                elif kind == H:
                    arrival_b[s, c] = done
                elif kind != F and kind != W and kind != G and s > 0:
                    link_b[s - 1] = max(done, link_b[s - 1]) + link_seconds[GRADIENT, s - 1, c]
                    arrival_b[s - 1, c] = link_b[s - 1] + latency
        if left == before:
            return np.inf, peak, start, stop
    return free.max(), peak, start, stop
