"""Orders kept while the work changes: what they take with other durations and bytes.

A list schedule answers every change of recompute with another order, and the order that an earlier
one led to is at times the better for the new work as well.
"""

import numpy as np
from numba import njit

from megatron_epp.planner.order.list_scheduler import Listed
from megatron_epp.planner.order.problem import Work


def replayed(work: Work, listed: Listed, split: bool) -> Listed:
    """The orders of ``listed`` with ``work`` of the same chunks; ``split``: they hold I and W."""
    seconds, peaks, start, stop = _replay(
        work.forward_seconds,
        work.input_seconds if split else work.backward_seconds,
        work.weight_seconds,
        work.link_forward_seconds,
        work.link_backward_seconds,
        work.link_latency_seconds,
        work.split_bytes if split else work.whole_bytes,
        listed.kinds,
        listed.chunks,
    )
    over = max(0.0, float((peaks - work.budget_bytes).max()))
    return Listed(seconds, peaks, over, listed.kinds, listed.chunks, start, stop)


@njit(cache=True)
def _replay(
    forward_seconds,
    backward_seconds,
    weight_seconds,
    link_forward,
    link_backward,
    latency,
    moves,
    kinds,
    chunks,
):
    # An order that ran once runs again, so what a stage needs of itself lies behind it: only
    # messages have to be waited for.
    stages, count = forward_seconds.shape
    per_stage = kinds.shape[1]
    start, stop = np.zeros((stages, per_stage)), np.zeros((stages, per_stage))
    arrival_f = np.full((stages, count), np.inf)
    arrival_b = np.full((stages, count), np.inf)
    arrival_f[0, :] = 0.0
    arrival_b[stages - 1, :] = 0.0
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
                ready, taken = 0.0, weight_seconds[s, c]
                if kind == 0:
                    ready, taken = arrival_f[s, c], forward_seconds[s, c]
                elif kind == 1:
                    ready, taken = arrival_b[s, c], backward_seconds[s, c]
                if ready == np.inf:
                    break
                begin = max(free[s], ready)
                done = begin + taken
                start[s, i], stop[s, i], free[s] = begin, done, done
                held[s] += moves[kind, 0, s, c]
                peak[s] = max(peak[s], held[s])
                held[s] -= moves[kind, 1, s, c]
                at[s] += 1
                left -= 1
                if kind == 0 and s + 1 < stages:
                    link_f[s] = max(done, link_f[s]) + link_forward[s, c]
                    arrival_f[s + 1, c] = link_f[s] + latency
                elif kind == 1 and s > 0:
                    link_b[s - 1] = max(done, link_b[s - 1]) + link_backward[s - 1, c]
                    arrival_b[s - 1, c] = link_b[s - 1] + latency
        if left == before:
            return np.inf, peak, start, stop
    return free.max(), peak, start, stop
