"""List scheduling: every stage, whenever it is free, takes the op that its policy likes best.

Forwards run in chunk order and backwards in theirs on every stage, so a policy only says which of
three is next: the next F, the next B (or I), the oldest waiting W. Memory is charged as the rule
table says; an F that would leave the stage without room to run its backwards waits.

With vocabulary parallelism an H runs as soon as its stage is free and what it needs has come: the
other stages' H of that chunk wait for it, and the last stage's B for all of them. G waits for a
gap, as W does, and goes first where W does.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from megatron_epp.ir import KIND_CODE, Kind
from megatron_epp.planner.order.problem import ScheduleProblem

# ir.KIND_CODE, in this file: compiled code is cached, and the cache notices changes of its own file
# only.
F, B, I, W, H, G = 0, 1, 2, 3, 4, 5  # noqa: E741  (the letters of plans)
assert [KIND_CODE[Kind(letter)] for letter in "FBIWHG"] == [F, B, I, W, H, G]
ACTIVATION, GRADIENT, HEAD = 0, 1, 2  # ir.Payload
BLOCK = 8  # stages looked at together
# Where backwards are whole, G alone fills gaps: so many wait at most, in the mean seconds of one,
# and a gap may be overrun by that share of one. By hand.
HELD_HEADS = 4
HEAD_PATIENCE = 0.6


@dataclass(frozen=True, slots=True)
class Policy:
    """What a stage prefers.

    least[stage][k]   forwards that must have run before backward k of that stage
    first[stage][k]   while k backwards have run, an F goes before a B below this many forwards
    most[stage][k]    while k backwards have run, no F beyond this many forwards
    split             run I and W instead of B
    held_seconds      a W or G goes first where this much of their work already waits on the stage
    patience          a W or G starts only if it ends at most this share of itself after the next
                      awaited input
    A strict order has least = first = most; without a split nothing is left to choose then, so
    memory is measured and does not hold an op back. Where B is whole, what is said of W here is
    HELD_HEADS and HEAD_PATIENCE of G.
    """

    least: np.ndarray
    first: np.ndarray
    most: np.ndarray
    split: bool = False
    held_seconds: float = np.inf
    patience: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each stage runs and when.

    kinds, chunks   [stages, ops] codes of kinds (ir.KIND_CODE), and chunks
    start, stop     [stages, ops] seconds
    peak_bytes      [stages] beside residents
    """

    seconds: float
    peak_bytes: np.ndarray
    over_bytes: float  # the most that any stage is above its budget, 0 if none
    kinds: np.ndarray
    chunks: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def list_schedule(work: ScheduleProblem, policy: Policy) -> Schedule:
    """The orders that ``policy`` leads to, and what playing them takes."""
    fixed = policy.least is policy.most and not policy.split
    held_seconds, patience = policy.held_seconds, policy.patience
    if work.vocabulary_parallel and not policy.split:
        held_seconds = HELD_HEADS * float(work.ops.seconds[G].mean())
        patience = HEAD_PATIENCE
    taken, peaks, kinds, chunks, start, stop = _schedule(
        work.ops.seconds,
        work.ops.link_seconds,
        work.ops.latency,
        work.ops.moved_bytes,
        work.backward_order,
        work.last_of_group,
        np.full(work.stages, np.inf) if fixed else work.budget_bytes,
        policy.least,
        policy.first,
        policy.most,
        policy.split,
        held_seconds,
        patience,
    )
    over = max(0.0, float((peaks - work.budget_bytes).max()))
    return Schedule(taken, peaks, over, kinds, chunks, start, stop)


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
def _schedule(
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
    # Shapes as in sim.engine.OpArrays; ``back`` is the kind that hands the gradient on.
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
    arrival_f = np.full((stages, count), np.inf)
    arrival_b = np.full((stages, count), np.inf)
    own_b = np.full((stages, count), np.inf)  # when the stage's own forward was done
    arrival_f[0, :] = 0.0
    arrival_b[stages - 1, :] = 0.0
    link_f = np.zeros(stages)
    link_b = np.zeros(stages)
    rise = _rise(moves, split, head)
    # Of vocabulary parallelism; arrays of nothing without it.
    parts = stages if head else 0
    heads = np.zeros(parts, dtype=np.int64)
    head_weights = np.zeros(parts, dtype=np.int64)
    arrival_h = np.full((parts, count), np.inf)
    to_come = np.zeros(parts)  # bytes that the H of chunks whose F has run will make
    aside = np.zeros(parts)  # what the largest H or G needs while it runs
    link_h = 0.0  # from the last stage to the first; of two stages it is the gradients'
    if head:
        arrival_b[stages - 1, :] = np.inf
        for s in range(stages):
            for c in range(count):
                aside[s] = max(aside[s], moves[H, 1, s, c], moves[G, 0, s, c])
    left = stages * per_stage
    # The stage that wakes first, by blocks: firsts[b] is the first to wake of block b.
    blocks = (stages + BLOCK - 1) // BLOCK
    firsts = np.arange(blocks) * BLOCK
    stale = np.zeros(blocks, dtype=np.bool_)
    while left > 0:
        s = 0
        for b in range(blocks):
            if stale[b]:
                first_of = b * BLOCK
                for q in range(first_of + 1, min(stages, first_of + BLOCK)):
                    if wake[q] < wake[first_of]:
                        first_of = q
                firsts[b], stale[b] = first_of, False
            if b == 0 or wake[firsts[b]] < wake[s]:
                s = firsts[b]
        now = wake[s]
        forced = -1
        if now == np.inf:
            # Nobody can go on within the budget: the first stage with an F at hand takes it.
            now = 0.0
            for q in range(stages):
                if forwards[q] < count and arrival_f[q, forwards[q]] < np.inf:
                    forced = q
                    break
            if forced < 0:
                return np.inf, peak, kinds, chunks, start, stop
            s = forced
            now = max(free_at[s], arrival_f[s, forwards[s]])
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
                if arrival_h[s, heads[s]] <= now:
                    chosen = H
                else:
                    later = min(later, arrival_h[s, heads[s]])
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
                    if arrival_f[s, f] <= now:
                        can_f = True
                    else:
                        later = min(later, arrival_f[s, f])
                else:
                    memory_blocks = arrival_f[s, f] <= now
            can_b, b_lacks_room = False, False
            if chosen < 0 and k < count:
                c = backward_order[k]
                if f > last_of_group[c] and f >= min(least[s, k], count):
                    b_lacks_room = held[s] + moves[back, 0, s, c] > budget[s]
                    ready = max(own_b[s, c], arrival_b[s, c])
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
            if s + 1 < stages:
                sent = max(done, link_f[s]) + link_seconds[ACTIVATION, s, c]
                link_f[s] = sent
                arrival_f[s + 1, c] = sent + latency
                if ran[s + 1] < per_stage:
                    wake[s + 1] = min(wake[s + 1], max(free_at[s + 1], sent + latency))
                    stale[(s + 1) // BLOCK] = True
            elif head:
                busy = link_b[0] if stages == 2 else link_h
                sent = max(done, busy) + link_seconds[HEAD, stages - 1, c]
                if stages == 2:
                    link_b[0] = sent
                else:
                    link_h = sent
                arrival_h[0, c] = sent + latency
                if ran[0] < per_stage:
                    wake[0] = min(wake[0], max(free_at[0], sent + latency))
                    stale[0] = True
        elif chosen == H:
            heads[s] += 1
            to_come[s] -= moves[H, 0, s, c] - moves[H, 1, s, c]
            if s + 1 < stages:
                sent = max(done, link_f[s]) + link_seconds[HEAD, s, c]
                link_f[s] = sent
                arrival_h[s + 1, c] = sent + latency
                if ran[s + 1] < per_stage:
                    wake[s + 1] = min(wake[s + 1], max(free_at[s + 1], sent + latency))
                    stale[(s + 1) // BLOCK] = True
            else:
                arrival_b[s, c] = done
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
            if s > 0:
                sent = max(done, link_b[s - 1]) + link_seconds[GRADIENT, s - 1, c]
                link_b[s - 1] = sent
                arrival_b[s - 1, c] = sent + latency
                if ran[s - 1] < per_stage:
                    wake[s - 1] = min(wake[s - 1], max(free_at[s - 1], sent + latency))
                    stale[(s - 1) // BLOCK] = True
        else:
            weights[s] += 1
            waiting_seconds[s] -= seconds[W, s, c]
            waiting_bytes[s] -= moves[W, 1, s, c] - moves[W, 0, s, c]
    return free_at.max(), peak, kinds, chunks, start, stop
