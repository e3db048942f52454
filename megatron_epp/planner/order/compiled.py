"""The loops of list scheduling and of replaying, compiled: what runs next, when, and what it holds.

They stand in one file because compiled code is kept on disk, and what is kept notices changes of
its own file only. For the same reason the codes of ir.KIND_CODE and ir.Payload are written here.
"""

import numpy as np
from numba import njit

from megatron_epp.ir import KIND_CODE, Kind

F, B, I, W, H, G = 0, 1, 2, 3, 4, 5  # noqa: E741  (the letters of plans)
assert [KIND_CODE[Kind(letter)] for letter in "FBIWHG"] == [F, B, I, W, H, G]
ACTIVATION, GRADIENT, HEAD = 0, 1, 2  # ir.Payload
BLOCK = 8  # stages looked at together


@njit(cache=True)
def _message(kind, s, stages, head):
    """(link, payload, row of link_seconds, receiver) of what an op of stage ``s`` hands on.

    Links go down (s to s + 1), then up (s + 1 to s, behind them), then from the last stage to the
    first; of two stages that is the one that goes up. A receiver of -1: the op hands nothing on; a
    link of -1: what it made lies there at once.
    """
    if kind == F and s + 1 < stages:
        return s, ACTIVATION, s, s + 1
    if kind == F and head:
        return (stages if stages == 2 else 2 * stages), HEAD, stages - 1, 0
    if kind == H and s + 1 < stages:
        return s, HEAD, s, s + 1
    if kind == H:
        return -1, GRADIENT, s, s
    if kind in (B, I) and s > 0:
        return stages + s - 1, GRADIENT, s - 1, s - 1
    return -1, 0, 0, -1


@njit(cache=True)
def _arrivals(stages, count, head):
    """[payloads, stages, chunks] seconds at which what an F, a B (or I), an H needs has come."""
    arrival = np.full((3 if head else 2, stages, count), np.inf)
    arrival[ACTIVATION, 0, :] = 0.0
    if not head:
        arrival[GRADIENT, stages - 1, :] = 0.0
    return arrival


@njit(cache=True)
def _drain_peak(stage, chunk, back, backward_order, last_of_group, moves, split, head):
    """How far memory would rise above what is held, were the backwards of all whole groups up to
    ``chunk`` run now.

    back: the stage's next backward. A W or G runs right behind its I, as it would if memory asked.
    """
    held, peak = 0.0, 0.0
    kind = I if split else B
    for k in range(back, len(backward_order)):
        c = backward_order[k]
        if last_of_group[c] > chunk:
            break
        held += moves[kind, 0, stage, c]
        peak = max(peak, held)
        held -= moves[kind, 1, stage, c]
        if split:
            held += moves[W, 0, stage, c] - moves[W, 1, stage, c]
        if head:
            held += moves[G, 0, stage, c] - moves[G, 1, stage, c]
    return peak


@njit(cache=True)
def _rise(moves, split, head):
    """[stages]: a bound on the same that holds whatever is alive, or infinity where none does.

    As long as every backward frees no less than it makes, draining never rises above what is held
    by more than one backward makes.
    """
    stages, count = moves.shape[2], moves.shape[3]
    rise = np.zeros(stages)
    kind = I if split else B
    for s in range(stages):
        for c in range(count):
            rise[s] = max(rise[s], moves[kind, 0, s, c])
            net = moves[kind, 0, s, c] - moves[kind, 1, s, c]
            if split:
                net += moves[W, 0, s, c] - moves[W, 1, s, c]
            if head:
                net += moves[G, 0, s, c] - moves[G, 1, s, c]
            if net > 0:
                rise[s] = np.inf
                break
    return rise


@njit(cache=True)
def _first_to_wake(wake, firsts, stale):
    """The stage, the first among equals; brings ``firsts`` of the ``stale`` blocks up to date."""
    s = 0
    for b in range(len(firsts)):
        if stale[b]:
            first = b * BLOCK
            for q in range(first + 1, min(len(wake), first + BLOCK)):
                if wake[q] < wake[first]:
                    first = q
            firsts[b], stale[b] = first, False
        if b == 0 or wake[firsts[b]] < wake[s]:
            s = firsts[b]
    return s


@njit(cache=True)
def _first_with(forwards, arrival_f):
    """The first stage whose next forward has what it needs, -1 where none has."""
    for s in range(len(forwards)):
        if forwards[s] < arrival_f.shape[1] and arrival_f[s, forwards[s]] < np.inf:
            return s
    return -1


@njit(cache=True)
def schedule_with(
    seconds,
    link_seconds,
    latency,
    moves,
    backward_order,
    last_of_group,
    budget,
    least,
    first,
    most,
    split,
    held_seconds,
    patience,
):
    """As list_scheduler.list_schedule says, of arrays: seconds, peaks, kinds, chunks, start, stop.

    Shapes as in sim.engine.OpArrays and list_scheduler.Policy; ``back`` is the kind that hands the
    gradient on.
    """
    stages, count = seconds.shape[1:]
    back = I if split else B
    head = len(seconds) > H
    per_stage = ((3 if split else 2) + (2 if head else 0)) * count
    kinds = np.zeros((stages, per_stage), dtype=np.int8)
    chunks = np.zeros((stages, per_stage), dtype=np.int32)
    start = np.zeros((stages, per_stage))
    stop = np.zeros((stages, per_stage))
    ran = np.zeros(stages, dtype=np.int64)
    forwards = np.zeros(stages, dtype=np.int64)
    backs = np.zeros(stages, dtype=np.int64)
    weights = np.zeros(stages, dtype=np.int64)
    waiting_seconds = np.zeros(stages)
    waiting_bytes = np.zeros(stages)
    free_at = np.zeros(stages)
    wake = np.zeros(stages)
    held = np.zeros(stages)
    peak = np.zeros(stages)
    arrival = _arrivals(stages, count, head)
    own_b = np.full((stages, count), np.inf)  # when the stage's own forward was done
    links = np.zeros(2 * stages + 1)  # busy until
    rise = _rise(moves, split, head)
    # Of vocabulary parallelism; arrays of nothing without it.
    parts = stages if head else 0
    heads = np.zeros(parts, dtype=np.int64)
    head_weights = np.zeros(parts, dtype=np.int64)
    to_come = np.zeros(parts)  # bytes that the H of chunks whose F has run will make
    aside = np.zeros(parts)  # what the largest H or G needs while it runs
    for s in range(parts):
        for c in range(count):
            aside[s] = max(aside[s], moves[H, 1, s, c], moves[G, 0, s, c])
    left = stages * per_stage
    # The first stage to wake of every block, and the blocks that must be looked through again.
    blocks = (stages + BLOCK - 1) // BLOCK
    firsts = np.arange(blocks) * BLOCK
    stale = np.zeros(blocks, dtype=np.bool_)
    while left > 0:
        s = _first_to_wake(wake, firsts, stale)
        now = wake[s]
        forced = -1
        if now == np.inf:
            # Nobody can go on within the budget: the first stage with an F at hand takes it.
            forced = _first_with(forwards, arrival[ACTIVATION])
            if forced < 0:
                return np.inf, peak, kinds, chunks, start, stop
            s = forced
            now = max(free_at[s], arrival[ACTIVATION, s, forwards[s]])
        stale[s // BLOCK] = True
        f, k = forwards[s], backs[s]
        chosen = -1
        later = np.inf  # when the next awaited input is known to arrive
        can_f = False
        memory_blocks = False
        if forced >= 0:
            chosen = F
        else:
            if head and heads[s] < count:
                if arrival[HEAD, s, heads[s]] <= now:
                    chosen = H
                else:
                    later = min(later, arrival[HEAD, s, heads[s]])
            if chosen < 0 and f < count and f < most[s, min(k, count - 1)]:
                # Room for the F itself, and to drain from there.
                held_f = held[s] + moves[F, 0, s, f]
                if head:
                    held_f += to_come[s] + moves[H, 0, s, f] - moves[H, 1, s, f] + aside[s]
                base = held_f - moves[F, 1, s, f] - waiting_bytes[s]
                if held_f <= budget[s] and (
                    base + rise[s] <= budget[s]
                    or base
                    + _drain_peak(s, f, k, backward_order, last_of_group, moves, split, head)
                    <= budget[s]
                ):
                    if arrival[ACTIVATION, s, f] <= now:
                        can_f = True
                    else:
                        later = min(later, arrival[ACTIVATION, s, f])
                else:
                    memory_blocks = arrival[ACTIVATION, s, f] <= now
            can_b, b_lacks_room = False, False
            if chosen < 0 and k < count:
                c = backward_order[k]
                if f > last_of_group[c] and f >= min(least[s, k], count):
                    b_lacks_room = held[s] + moves[back, 0, s, c] > budget[s]
                    ready = max(own_b[s, c], arrival[GRADIENT, s, c])
                    if ready <= now:
                        can_b = True
                    else:
                        later = min(later, ready)
            can_w = split and weights[s] < k
            can_g = head and head_weights[s] < k
            if chosen >= 0:
                pass
            elif (can_w or can_g) and (
                waiting_seconds[s] > held_seconds
                or (memory_blocks and not can_b)
                or (b_lacks_room and not can_f)
            ):
                chosen = W if can_w and not (can_g and head_weights[s] < weights[s]) else G
            elif can_f and f < first[s, min(k, count - 1)]:
                chosen = F
            elif can_b:
                chosen = back
            elif can_f:
                chosen = F
            else:
                if can_w:
                    c = backward_order[weights[s]]
                    if now + (1.0 - patience) * seconds[W, s, c] <= later:
                        chosen = W
                if can_g and chosen < 0:
                    c = backward_order[head_weights[s]]
                    if now + (1.0 - patience) * seconds[G, s, c] <= later:
                        chosen = G
        if chosen < 0:
            wake[s] = later
            continue
        # Run it.
        i = ran[s]
        if chosen == F:
            c = f
        elif chosen == back:
            c = backward_order[k]
        elif chosen == H:
            c = heads[s]
        elif chosen == G:
            c = backward_order[head_weights[s]]
        else:
            c = backward_order[weights[s]]
        done = now + seconds[chosen, s, c]
        kinds[s, i], chunks[s, i], start[s, i], stop[s, i] = chosen, c, now, done
        held[s] += moves[chosen, 0, s, c]
        if held[s] > peak[s]:
            peak[s] = held[s]
        held[s] -= moves[chosen, 1, s, c]
        ran[s] += 1
        left -= 1
        free_at[s] = done
        wake[s] = done if ran[s] < per_stage else np.inf
        if chosen == F:
            forwards[s] += 1
            own_b[s, c] = done
            if head:
                to_come[s] += moves[H, 0, s, c] - moves[H, 1, s, c]
        elif chosen == H:
            heads[s] += 1
            to_come[s] -= moves[H, 0, s, c] - moves[H, 1, s, c]
        elif chosen == G:
            head_weights[s] += 1
            waiting_seconds[s] -= seconds[G, s, c]
            waiting_bytes[s] -= moves[G, 1, s, c] - moves[G, 0, s, c]
        elif chosen == back:
            backs[s] += 1
            if head:
                waiting_seconds[s] += seconds[G, s, c]
                waiting_bytes[s] += moves[G, 1, s, c] - moves[G, 0, s, c]
            if split:
                waiting_seconds[s] += seconds[W, s, c]
                waiting_bytes[s] += moves[W, 1, s, c] - moves[W, 0, s, c]
        else:
            weights[s] += 1
            waiting_seconds[s] -= seconds[W, s, c]
            waiting_bytes[s] -= moves[W, 1, s, c] - moves[W, 0, s, c]
        link, payload, row, to = _message(chosen, s, stages, head)
        if link >= 0:
            links[link] = max(done, links[link]) + link_seconds[payload, row, c]
            come = links[link] + latency
            arrival[payload, to, c] = come
            if ran[to] < per_stage:
                wake[to] = min(wake[to], max(free_at[to], come))
                stale[to // BLOCK] = True
        elif to >= 0:
            arrival[payload, to, c] = done
    return free_at.max(), peak, kinds, chunks, start, stop


@njit(cache=True)
def replay_of(seconds, link_seconds, latency, moves, kinds, chunks):
    """As replay.replayed says, of arrays: seconds, peaks, start, stop.

    An order that ran once runs again, so what a stage needs of itself lies behind it: only messages
    have to be waited for.
    """
    stages, count = seconds.shape[1:]
    per_stage = kinds.shape[1]
    start, stop = np.zeros((stages, per_stage)), np.zeros((stages, per_stage))
    head = len(seconds) > H
    arrival = _arrivals(stages, count, head)
    links = np.zeros(2 * stages + 1)
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
                    ready = arrival[ACTIVATION, s, c]
                elif kind == H:
                    ready = arrival[HEAD, s, c]
                elif kind != W and kind != G:
                    ready = arrival[GRADIENT, s, c]
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
                link, payload, row, to = _message(kind, s, stages, head)
                if link >= 0:
                    links[link] = max(done, links[link]) + link_seconds[payload, row, c]
                    arrival[payload, to, c] = links[link] + latency
                elif to >= 0:
                    arrival[payload, to, c] = done
        if left == before:
            return np.inf, peak, start, stop
    return free.max(), peak, start, stop
