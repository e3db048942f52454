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
BLOCK = 8  # ranks looked at together


@njit(cache=True, inline="always")
def _message(kind, s, stages, head):
    """(payload, row of link_seconds, receiving stage) of what an op of stage ``s`` hands on; the
    stage itself where what it made lies there at once, -1 where it hands nothing on."""
    if kind == F and s + 1 < stages:
        return ACTIVATION, s, s + 1
    if kind == F and head:
        return HEAD, stages - 1, 0
    if kind == H and s + 1 < stages:
        return HEAD, s, s + 1
    if kind == H:
        return GRADIENT, s, s
    if kind in (B, I) and s > 0:
        return GRADIENT, s - 1, s - 1
    return 0, 0, -1


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


@njit(cache=True, inline="always")
def _first_to_wake(wake, firsts, stale):
    """The rank, the first among equals; brings ``firsts`` of the ``stale`` blocks up to date."""
    r = 0
    for b in range(len(firsts)):
        if stale[b]:
            first = b * BLOCK
            for q in range(first + 1, min(len(wake), first + BLOCK)):
                if wake[q] < wake[first]:
                    first = q
            firsts[b], stale[b] = first, False
        if b == 0 or wake[firsts[b]] < wake[r]:
            r = firsts[b]
    return r


@njit(cache=True)
def _first_with(forwards, arrival_f, rank_of, deep):
    """The first stage whose next forward has what it needs, -1 where none has; ``deep``: the last
    such stage of its rank."""
    found = -1
    for s in range(len(forwards)):
        if forwards[s] < arrival_f.shape[1] and arrival_f[s, forwards[s]] < np.inf:
            if found < 0:
                found = s
            elif rank_of is not None:  # noqa: SIM102  (numba leaves the branch out only like this)
                if deep and rank_of[s] == rank_of[found]:
                    found = s
    return found


@njit(cache=True)
def schedule_with(
    seconds,
    link_seconds,
    latency,
    moves,
    backward_order,
    last_of_group,
    rank_of,
    budget,
    least,
    first,
    most,
    split,
    held_seconds,
    patience,
    deep,
):
    """As list_scheduler.list_schedule says, of arrays: seconds, peaks, kinds, chunks, stages,
    start, stop.

    Shapes as in sim.engine.OpArrays and list_scheduler.Policy; ``back`` is the kind that hands the
    gradient on. ``rank_of``: None where stage i lies on rank i, which is compiled apart, as a loop
    over the stages of a rank costs up to a third there; ``stages`` has no columns then.
    """
    stages, count = seconds.shape[1:]
    ranks, counted = least.shape
    back = I if split else B
    head = len(link_seconds) > HEAD  # as vocabulary parallelism has
    per_stage = ((3 if split else 2) + (2 if head else 0)) * count
    per_rank = np.full(ranks, per_stage)
    width, noted = per_stage, 0
    if rank_of is not None:  # the stages of rank r: own[own_from[r]:own_from[r + 1]]
        own = np.argsort(rank_of, kind="mergesort")
        own_from = np.searchsorted(rank_of[own], np.arange(ranks + 1))
        per_rank = per_stage * (own_from[1:] - own_from[:-1])
        width = noted = per_rank.max()
    kinds = np.full((ranks, width), -1, dtype=np.int8)  # of no kind behind a rank's last op
    chunks = np.zeros((ranks, width), dtype=np.int32)
    on_stage = np.zeros((ranks, noted), dtype=np.int32)
    start = np.zeros((ranks, width))
    stop = np.zeros((ranks, width))
    forwards = np.zeros(stages, dtype=np.int64)
    backs = np.zeros(stages, dtype=np.int64)
    weights = np.zeros(stages, dtype=np.int64)
    ran = np.zeros(ranks, dtype=np.int64)
    all_forwards = np.zeros(ranks, dtype=np.int64)
    all_backs = np.zeros(ranks, dtype=np.int64)
    waiting_seconds = np.zeros(ranks)
    waiting_bytes = np.zeros(ranks)
    free_at = np.zeros(ranks)
    wake = np.zeros(ranks)
    held = np.zeros(ranks)
    peak = np.zeros(ranks)
    arrival = _arrivals(stages, count, head)
    own_b = np.full((stages, count), np.inf)  # when the stage's own forward was done
    links = np.zeros((ranks, ranks))  # from rank to rank: busy until
    rise = _rise(moves, split, head)
    # Of vocabulary parallelism; arrays of nothing without it.
    heads = np.zeros(stages if head else 0, dtype=np.int64)
    head_weights = np.zeros(stages if head else 0, dtype=np.int64)
    to_come = np.zeros(ranks if head else 0)  # that the H of chunks whose F has run will make
    reserved = np.zeros(ranks if head else 0)  # what the largest H or G needs while it runs
    for s in range(len(heads)):
        for c in range(count):
            r = s
            if rank_of is not None:
                r = rank_of[s]
            reserved[r] = max(reserved[r], moves[H, 1, s, c], moves[G, 0, s, c])
    left = stages * per_stage
    # The first rank to wake of every block, and the blocks that must be looked through again.
    blocks = (ranks + BLOCK - 1) // BLOCK
    firsts = np.arange(blocks) * BLOCK
    stale = np.zeros(blocks, dtype=np.bool_)
    while left > 0:
        r = _first_to_wake(wake, firsts, stale)
        now = wake[r]
        chosen, s = -1, -1
        later = np.inf  # when the next awaited input is known to arrive
        if now == np.inf:
            # Nobody can go on within the budget: the first stage with an F at hand takes it.
            s = _first_with(forwards, arrival[ACTIVATION], rank_of, deep)
            if s < 0:
                return np.inf, peak, kinds, chunks, on_stage, start, stop
            chosen, r = F, s
            if rank_of is not None:
                r = rank_of[s]
            now = max(free_at[r], arrival[ACTIVATION, s, forwards[s]])
        low, high = r, r + 1
        if rank_of is not None:
            low, high = own_from[r], own_from[r + 1]
        if head and chosen < 0:
            for j in range(low, high):
                q = j
                if rank_of is not None:
                    q = own[j]
                if heads[q] < count:
                    if arrival[HEAD, q, heads[q]] > now:
                        later = min(later, arrival[HEAD, q, heads[q]])
                    elif chosen < 0:
                        chosen, s = H, q
        stale[r // BLOCK] = True
        if chosen < 0:
            can_f, can_b, can_w, can_g = -1, -1, -1, -1  # the stage that can
            memory_blocks, b_lacks_room = False, False
            f_done, b_done = all_forwards[r], min(all_backs[r], counted - 1)
            for j in range(low, high):
                q = j
                if rank_of is not None:
                    q = own[j]
                f, k = forwards[q], backs[q]
                if f < count and f_done < most[r, b_done]:
                    # Room for the F itself, and to drain from there.
                    held_f = held[r] + moves[F, 0, q, f]
                    if head:
                        held_f += to_come[r] + moves[H, 0, q, f] - moves[H, 1, q, f] + reserved[r]
                    base = held_f - moves[F, 1, q, f] - waiting_bytes[r]
                    if held_f <= budget[r] and (
                        base + rise[q] <= budget[r]
                        or base
                        + _drain_peak(q, f, k, backward_order, last_of_group, moves, split, head)
                        <= budget[r]
                    ):
                        if arrival[ACTIVATION, q, f] > now:
                            later = min(later, arrival[ACTIVATION, q, f])
                        elif can_f < 0 or deep:
                            can_f = q
                    elif arrival[ACTIVATION, q, f] <= now:
                        memory_blocks = True
                if k < count:
                    c = backward_order[k]
                    if f > last_of_group[c] and f_done >= min(least[r, b_done], counted):
                        if held[r] + moves[back, 0, q, c] > budget[r]:
                            b_lacks_room = True
                        ready = max(own_b[q, c], arrival[GRADIENT, q, c])
                        if ready > now:
                            later = min(later, ready)
                        elif can_b < 0:
                            can_b = q
                if split and can_w < 0 and weights[q] < k:
                    can_w = q
                if head and can_g < 0 and head_weights[q] < k:
                    can_g = q
            if (can_w >= 0 or can_g >= 0) and (
                waiting_seconds[r] > held_seconds
                or (memory_blocks and can_b < 0)
                or (b_lacks_room and can_f < 0)
            ):
                if can_w >= 0 and not (can_g >= 0 and head_weights[can_g] < weights[can_w]):
                    chosen, s = W, can_w
                else:
                    chosen, s = G, can_g
            elif can_f >= 0 and f_done < first[r, b_done]:
                chosen, s = F, can_f
            elif can_b >= 0:
                chosen, s = back, can_b
            elif can_f >= 0:
                chosen, s = F, can_f
            else:
                if can_w >= 0:
                    c = backward_order[weights[can_w]]
                    if now + (1.0 - patience) * seconds[W, can_w, c] <= later:
                        chosen, s = W, can_w
                if can_g >= 0 and chosen < 0:
                    c = backward_order[head_weights[can_g]]
                    if now + (1.0 - patience) * seconds[G, can_g, c] <= later:
                        chosen, s = G, can_g
            if chosen < 0:
                wake[r] = later
                continue
        # Run it.
        i = ran[r]
        if chosen == F:
            c = forwards[s]
        elif chosen == back:
            c = backward_order[backs[s]]
        elif chosen == H:
            c = heads[s]
        elif chosen == G:
            c = backward_order[head_weights[s]]
        else:
            c = backward_order[weights[s]]
        done = now + seconds[chosen, s, c]
        kinds[r, i], chunks[r, i], start[r, i], stop[r, i] = chosen, c, now, done
        if rank_of is not None:
            on_stage[r, i] = s
        held[r] += moves[chosen, 0, s, c]
        if held[r] > peak[r]:
            peak[r] = held[r]
        held[r] -= moves[chosen, 1, s, c]
        ran[r] += 1
        left -= 1
        free_at[r] = done
        wake[r] = done if ran[r] < per_rank[r] else np.inf
        if chosen == F:
            forwards[s] += 1
            all_forwards[r] += 1
            own_b[s, c] = done
            if head:
                to_come[r] += moves[H, 0, s, c] - moves[H, 1, s, c]
        elif chosen == H:
            heads[s] += 1
            to_come[r] -= moves[H, 0, s, c] - moves[H, 1, s, c]
        elif chosen == G:
            head_weights[s] += 1
            waiting_seconds[r] -= seconds[G, s, c]
            waiting_bytes[r] -= moves[G, 1, s, c] - moves[G, 0, s, c]
        elif chosen == back:
            backs[s] += 1
            all_backs[r] += 1
            if head:
                waiting_seconds[r] += seconds[G, s, c]
                waiting_bytes[r] += moves[G, 1, s, c] - moves[G, 0, s, c]
            if split:
                waiting_seconds[r] += seconds[W, s, c]
                waiting_bytes[r] += moves[W, 1, s, c] - moves[W, 0, s, c]
        else:
            weights[s] += 1
            waiting_seconds[r] -= seconds[W, s, c]
            waiting_bytes[r] -= moves[W, 1, s, c] - moves[W, 0, s, c]
        payload, row, to = _message(chosen, s, stages, head)
        if to < 0:
            continue
        other = to
        if rank_of is not None:
            other = rank_of[to]
        if other == r:
            arrival[payload, to, c] = done
            continue
        links[r, other] = max(done, links[r, other]) + link_seconds[payload, row, c]
        come = links[r, other] + latency
        arrival[payload, to, c] = come
        if ran[other] < per_rank[other]:
            wake[other] = min(wake[other], max(free_at[other], come))
            stale[other // BLOCK] = True
    return free_at.max(), peak, kinds, chunks, on_stage, start, stop


@njit(cache=True)
def replay_of(seconds, link_seconds, latency, moves, kinds, chunks):
    """As replay.replayed says, of arrays: seconds, peaks, start, stop.

    An order that ran once runs again, so what a stage needs of itself lies behind it: only messages
    have to be waited for.
    """
    stages, count = seconds.shape[1:]
    per_stage = kinds.shape[1]
    start, stop = np.zeros((stages, per_stage)), np.zeros((stages, per_stage))
    head = len(link_seconds) > HEAD  # as vocabulary parallelism has
    arrival = _arrivals(stages, count, head)
    links = np.zeros((stages, stages))
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
                payload, row, to = _message(kind, s, stages, head)
                if to == s:
                    arrival[payload, to, c] = done
                elif to >= 0:
                    links[s, to] = max(done, links[s, to]) + link_seconds[payload, row, c]
                    arrival[payload, to, c] = links[s, to] + latency
        if left == before:
            return np.inf, peak, start, stop
    return free.max(), peak, start, stop
