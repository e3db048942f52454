"""List scheduling: every stage, whenever it is free, takes the op that its policy likes best.

Forwards run in chunk order and backwards in theirs on every stage, so a policy only says which of
three is next: the next F, the next B (or I), the oldest waiting W. Memory is charged as the rule
table says; an F that would leave the stage without room to run its backwards waits.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from megatron_epp.planner.order.problem import Work

F, B, W = 0, 1, 2  # B stands for I where the backward is split
BLOCK = 8  # stages looked at together


@dataclass(frozen=True, slots=True)
class Policy:
    """What a stage prefers.

    least[stage][k]   forwards that must have run before backward k of that stage
    first[stage][k]   while k backwards have run, an F goes before a B below this many forwards
    most[stage][k]    while k backwards have run, no F beyond this many forwards
    split             run I and W instead of B
    held_seconds      a W goes first where this much W work already waits on the stage
    patience          a W starts only if it ends at most this share of itself after the next
                      awaited input
    A strict order has least = first = most; without a split nothing is left to choose then, so
    memory is measured and does not hold an op back.
    """

    least: np.ndarray
    first: np.ndarray
    most: np.ndarray
    split: bool = False
    held_seconds: float = np.inf
    patience: float = 0.0


@dataclass(frozen=True, slots=True)
class Listed:
    """kinds, chunks [stages, ops]: what each stage runs; ops[stage] how many of them count."""

    seconds: float
    peak_bytes: np.ndarray
    over_bytes: float  # the most that any stage is above its budget, 0 if none
    kinds: np.ndarray
    chunks: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def list_schedule(work: Work, policy: Policy) -> Listed:
    """The orders that ``policy`` leads to, and what playing them takes."""
    fixed = policy.least is policy.most and not policy.split
    seconds, peaks, kinds, chunks, start, stop = _schedule(
        work.forward_seconds,
        work.input_seconds if policy.split else work.backward_seconds,
        work.weight_seconds,
        work.backward_order,
        work.last_of_group,
        work.link_forward_seconds,
        work.link_backward_seconds,
        work.link_latency_seconds,
        work.split_bytes if policy.split else work.whole_bytes,
        np.full(work.stages, np.inf) if fixed else work.budget_bytes,
        policy.least,
        policy.first,
        policy.most,
        policy.split,
        policy.held_seconds,
        policy.patience,
    )
    over = max(0.0, float((peaks - work.budget_bytes).max()))
    return Listed(seconds, peaks, over, kinds, chunks, start, stop)


@njit(cache=True)
def _drain_peak(stage, chunk, back, backward_order, last_of_group, moves, split):
    """How far memory would rise above what is held, were the backwards of all whole groups up to
    ``chunk`` run now.

    back: the stage's next backward. A W runs right behind its I, as it would if memory asked.
    """
    held, peak = 0.0, 0.0
    for k in range(back, len(backward_order)):
        c = backward_order[k]
        if last_of_group[c] > chunk:
            break
        held += moves[1, 0, stage, c]
        peak = max(peak, held)
        held -= moves[1, 1, stage, c]
        if split:
            held += moves[2, 0, stage, c] - moves[2, 1, stage, c]
    return peak


@njit(cache=True)
def _rise(moves, split):
    """[stages]: a bound on the same that holds whatever is alive, or infinity where none does.

    As long as every backward frees no less than it makes, draining never rises above what is held
    by more than one backward makes.
    """
    stages, count = moves.shape[2], moves.shape[3]
    rise = np.zeros(stages)
    for s in range(stages):
        for c in range(count):
            rise[s] = max(rise[s], moves[1, 0, s, c])
            net = moves[1, 0, s, c] - moves[1, 1, s, c]
            if split:
                net += moves[2, 0, s, c] - moves[2, 1, s, c]
            if net > 0:
                rise[s] = np.inf
                break
    return rise


@njit(cache=True)
def _schedule(
    forward_seconds,
    backward_seconds,
    weight_seconds,
    backward_order,
    last_of_group,
    link_forward,
    link_backward,
    latency,
    moves,
    budget,
    least,
    first,
    most,
    split,
    held_seconds,
    patience,
):
    # moves[kind, 0, stage, chunk]: bytes that the op makes at its start; [kind, 1, ..]: that it
    # frees at its stop; kind 0 F, 1 B or I, 2 W.
    stages, count = forward_seconds.shape
    per_stage = (3 if split else 2) * count
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
    rise = _rise(moves, split)
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
            chosen = 0
        else:
            if f < count and f < most[s, min(k, count - 1)]:
                # Room for the F itself, and to drain from there.
                held_f = held[s] + moves[0, 0, s, f]
                base = held_f - moves[0, 1, s, f] - waiting_bytes[s]
                if held_f <= budget[s] and (
                    base + rise[s] <= budget[s]
                    or base + _drain_peak(s, f, k, backward_order, last_of_group, moves, split)
                    <= budget[s]
                ):
                    if arrival_f[s, f] <= now:
                        can_f = True
                    else:
                        later = min(later, arrival_f[s, f])
                else:
                    memory_blocks = arrival_f[s, f] <= now
            can_b, b_lacks_room = False, False
            if k < count:
                c = backward_order[k]
                if f > last_of_group[c] and f >= min(least[s, k], count):
                    b_lacks_room = held[s] + moves[1, 0, s, c] > budget[s]
                    ready = max(own_b[s, c], arrival_b[s, c])
                    if ready <= now:
                        can_b = True
                    else:
                        later = min(later, ready)
            can_w = split and weights[s] < k
            if can_w and (
                waiting_seconds[s] > held_seconds
                or (memory_blocks and not can_b)
                or (b_lacks_room and not can_f)
            ):
                chosen = 2
            elif can_f and f < first[s, min(k, count - 1)]:
                chosen = 0
            elif can_b:
                chosen = 1
            elif can_f:
                chosen = 0
            elif can_w:
                c = backward_order[weights[s]]
                if now + (1.0 - patience) * weight_seconds[s, c] <= later:
                    chosen = 2
        if chosen < 0:
            wake[s] = later
            continue
        # Run it.
        i = ran[s]
        if chosen == 0:
            c, taken = f, forward_seconds[s, f]
        elif chosen == 1:
            c = backward_order[k]
            taken = backward_seconds[s, c]
        else:
            c = backward_order[weights[s]]
            taken = weight_seconds[s, c]
        done = now + taken
        kinds[s, i], chunks[s, i], start[s, i], stop[s, i] = chosen, c, now, done
        held[s] += moves[chosen, 0, s, c]
        if held[s] > peak[s]:
            peak[s] = held[s]
        held[s] -= moves[chosen, 1, s, c]
        ran[s] += 1
        left -= 1
        free_at[s] = done
        wake[s] = done if ran[s] < per_stage else np.inf
        if chosen == 0:
            forwards[s] += 1
            own_b[s, c] = done
            if s + 1 < stages:
                sent = max(done, link_f[s]) + link_forward[s, c]
                link_f[s] = sent
                arrival_f[s + 1, c] = sent + latency
                if ran[s + 1] < per_stage:
                    wake[s + 1] = min(wake[s + 1], max(free_at[s + 1], sent + latency))
                    stale[(s + 1) // BLOCK] = True
        elif chosen == 1:
            backs[s] += 1
            if split:
                waiting_seconds[s] += weight_seconds[s, c]
                waiting_bytes[s] += moves[2, 1, s, c] - moves[2, 0, s, c]
            if s > 0:
                sent = max(done, link_b[s - 1]) + link_backward[s - 1, c]
                link_b[s - 1] = sent
                arrival_b[s - 1, c] = sent + latency
                if ran[s - 1] < per_stage:
                    wake[s - 1] = min(wake[s - 1], max(free_at[s - 1], sent + latency))
                    stale[(s - 1) // BLOCK] = True
        else:
            weights[s] += 1
            waiting_seconds[s] -= weight_seconds[s, c]
            waiting_bytes[s] -= moves[2, 1, s, c] - moves[2, 0, s, c]
    return free_at.max(), peak, kinds, chunks, start, stop
