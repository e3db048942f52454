"""Lists schedules of more stages than devices: whenever a device is free it takes an op of one of
its stages.

Forwards and backwards of a stage run in their orders, as in planner.order.list_scheduler; what a
device holds is the sum over its stages. A device runs forwards until ``warm`` of them wait for
their backwards, then a backward wherever one is ready; a W where nothing else is.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit

from megatron_epp.ir import KIND_CODE, Kind
from megatron_epp.sim.engine import OpArrays

# ir.KIND_CODE, in this file: the cache of compiled code notices changes of its own file only.
F, B, I, W = 0, 1, 2, 3  # noqa: E741  (the letters of plans)
assert [KIND_CODE[Kind(letter)] for letter in "FBIW"] == [F, B, I, W]

PlacementName = Literal["one", "interleaved", "wave"]


def placement(name: PlacementName, devices: int) -> np.ndarray:
    """[stages] the device of each.

    one           0 1 2 3
    interleaved   0 1 2 3 0 1 2 3
    wave          0 1 2 3 3 2 1 0   as in V schedules: the ends lie on one device
    """
    once = np.arange(devices)
    rows = {"one": [once], "interleaved": [once, once], "wave": [once, once[::-1]]}
    return np.concatenate(rows[name])


@dataclass(frozen=True, slots=True)
class VirtualSchedule:
    """seconds of the iteration; busy_seconds, peak_bytes [devices], beside residents; over_bytes:
    the most that a device is above its room."""

    seconds: float
    busy_seconds: np.ndarray
    peak_bytes: np.ndarray
    over_bytes: float


def schedule(
    work: OpArrays,
    backward_order: np.ndarray,
    last_of_group: np.ndarray,
    device_of: np.ndarray,
    room_bytes: np.ndarray,
    warm: np.ndarray,
    *,
    split: bool,
    deep: bool,
    strict: bool,
) -> VirtualSchedule:
    """Schedule of ``work`` over the virtual stages.

    warm    [devices] forwards that may wait for their backwards before backwards go first
    split   I and W in the place of B
    deep    of several forwards that are ready, the one of the latest stage, else of the earliest
    strict  never more forwards than ``warm``; too few for a group's first backward never end
    """
    seconds, busy, peak = _schedule(
        work.seconds,
        work.link_seconds,
        work.latency,
        work.moved_bytes,
        backward_order.astype(np.int64),
        last_of_group.astype(np.int64),
        device_of.astype(np.int64),
        room_bytes,
        warm.astype(np.int64),
        split,
        deep,
        strict,
    )
    over = max(0.0, float((peak - room_bytes).max())) if seconds < np.inf else np.inf
    return VirtualSchedule(seconds, busy, peak, over)


@njit(cache=True)
def _schedule(
    seconds,
    link_seconds,
    latency,
    moves,
    backward_order,
    last_of_group,
    device_of,
    room,
    warm,
    split,
    deep,
    strict,
):
    stages, count = seconds.shape[1:]
    devices = len(room)
    back = I if split else B
    ready_f = np.full((stages, count), np.inf)
    ready_b = np.full((stages, count), np.inf)
    own_b = np.full((stages, count), np.inf)
    ready_f[0, :] = 0.0
    ready_b[stages - 1, :] = 0.0
    f = np.zeros(stages, np.int64)
    k = np.zeros(stages, np.int64)
    w = np.zeros(stages, np.int64)
    link_f = np.zeros(stages)
    link_b = np.zeros(stages)
    free = np.zeros(devices)
    busy = np.zeros(devices)
    held = np.zeros(devices)
    peak = np.zeros(devices)
    alive = np.zeros(devices, np.int64)
    left = stages * count * (3 if split else 2)
    while left > 0:
        best_start, best_device, best_stage, best_kind = np.inf, -1, -1, -1
        for forced in range(2):  # within the room; then, where nobody can go on, above it
            for d in range(devices):
                # When the device could begin anything; then what it likes best of what is ready.
                now = np.inf
                for s in range(stages):
                    if device_of[s] != d:
                        continue
                    if f[s] < count and not (strict and alive[d] >= warm[d]):
                        rises = held[d] + moves[F, 0, s, f[s]]
                        if forced == 1 or rises <= room[d]:
                            now = min(now, max(free[d], ready_f[s, f[s]]))
                    if k[s] < count:
                        c = backward_order[k[s]]
                        if f[s] > last_of_group[c]:
                            now = min(now, max(free[d], ready_b[s, c], own_b[s, c]))
                if split and now > free[d]:
                    # A W that ends before the next input comes fills the wait.
                    for s in range(stages):
                        if device_of[s] == d and w[s] < k[s]:
                            c = backward_order[w[s]]
                            if free[d] + 0.5 * seconds[W, s, c] <= now and free[d] < best_start:
                                best_start, best_device, best_stage = free[d], d, s
                                best_kind = W
                if now >= best_start:
                    continue
                stage, kind = -1, -1
                forwards = alive[d] < warm[d]
                for turn in range(2):
                    if (turn == 0) == forwards:  # forwards now
                        for s in range(stages):
                            if device_of[s] != d or f[s] >= count:
                                continue
                            there = ready_f[s, f[s]] <= now
                            there = there and not (strict and alive[d] >= warm[d])
                            rises = held[d] + moves[F, 0, s, f[s]]
                            there = there and (forced == 1 or rises <= room[d])
                            if there and (stage < 0 or deep):
                                stage, kind = s, F
                    else:
                        for s in range(stages):
                            if device_of[s] != d or k[s] >= count:
                                continue
                            c = backward_order[k[s]]
                            there = f[s] > last_of_group[c]
                            there = there and max(ready_b[s, c], own_b[s, c]) <= now
                            if there and stage < 0:
                                stage, kind = s, back
                    if stage >= 0:
                        break
                if stage >= 0:
                    best_start, best_device, best_stage, best_kind = now, d, stage, kind
            if best_device < 0 and split:
                # A W frees what stands in a forward's way.
                for s in range(stages):
                    if w[s] < k[s] and free[device_of[s]] < best_start:
                        best_start, best_device = free[device_of[s]], device_of[s]
                        best_stage, best_kind = s, W
            if best_device >= 0:
                break
        if best_device < 0:
            return np.inf, busy, peak
        d, s, kind = best_device, best_stage, best_kind
        if kind == F:
            c = f[s]
            f[s] += 1
        elif kind == W:
            c = backward_order[w[s]]
            w[s] += 1
        else:
            c = backward_order[k[s]]
            k[s] += 1
        done = best_start + seconds[kind, s, c]
        held[d] += moves[kind, 0, s, c]
        peak[d] = max(peak[d], held[d])
        held[d] -= moves[kind, 1, s, c]
        busy[d] += seconds[kind, s, c]
        free[d] = done
        left -= 1
        if kind == F:
            alive[d] += 1
            own_b[s, c] = done
            if s + 1 < stages:
                sent = done
                if device_of[s + 1] != d:
                    sent = max(done, link_f[s]) + link_seconds[0, s, c]
                    link_f[s] = sent
                    sent += latency
                ready_f[s + 1, c] = sent
        elif kind == back:
            alive[d] -= 1
            if s > 0:
                sent = done
                if device_of[s - 1] != d:
                    sent = max(done, link_b[s - 1]) + link_seconds[1, s - 1, c]
                    link_b[s - 1] = sent
                    sent += latency
                ready_b[s - 1, c] = sent
        # W's need W after all: those left when nothing else is, run now.
        if split and left > 0:
            pending = True
            for q in range(stages):
                if device_of[q] == d and (f[q] < count or k[q] < count):
                    pending = False
            if pending:
                for q in range(stages):
                    while device_of[q] == d and w[q] < count:
                        c = backward_order[w[q]]
                        held[d] -= moves[W, 1, q, c] - moves[W, 0, q, c]
                        free[d] += seconds[W, q, c]
                        busy[d] += seconds[W, q, c]
                        w[q] += 1
                        left -= 1
    return free.max(), busy, peak
