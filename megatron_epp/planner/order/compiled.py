"""Compiled loops of the list scheduler, and of the simulation of given orders of ops.

The compiled functions are in one file because numba's disk cache only detects changes of a
function's own file. For the same reason, this file repeats the codes of ir.KIND_CODE and
ir.Payload.
"""

from typing import Any, NamedTuple

import numpy as np

from megatron_epp.ir import KIND_CODE, Kind
from megatron_epp.sim.jit import njit

F, B, I, W, H, G = 0, 1, 2, 3, 4, 5  # noqa: E741  (the letters of plans)
assert [KIND_CODE[Kind(code)] for code in "FBIWHG"] == [F, B, I, W, H, G]
NOTHING = -1  # no op
ACTIVATION, GRADIENT, HEAD = 0, 1, 2  # ir.Payload
FORWARD_DONE = 3  # additional index of ``arrival``: the stage's own F, which a B requires
BLOCK = 8  # number of ranks in a block of _first_to_wake
# LLVM inlines these functions. They allocate nothing, so numba need not count references to their
# array arguments, which would take as long as their work. Python code does not call them.
UNCOUNTED: dict[str, Any] = {
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
INLINED: dict[str, Any] = UNCOUNTED | {"forceinline": True}


@njit(inline="always")
def _message(kind, s, stages, head):
    """Return (payload, row of link_seconds, receiving stage) of the output of an op on stage ``s``.

    The receiving stage is ``s`` if the output stays there, and -1 if no op waits for the output.
    """
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


@njit()
def _arrivals(stages, count, head):
    """Return initial arrival times [payloads, stages, chunks] of inputs: 0 or infinite."""
    arrival = np.full((3 if head else 2, stages, count), np.inf)
    arrival[ACTIVATION, 0, :] = 0.0
    if not head:
        arrival[GRADIENT, stages - 1, :] = 0.0
    return arrival


@njit()
def _rise(moves, split, head):
    """Return an upper bound [stages] on :func:`_drain_peak` that holds for any chunks in flight.

    If every backward frees at least the bytes that it allocates, backwards raise memory by at most
    the bytes that one of them allocates. Otherwise the bound is infinite.
    """
    stages, count = moves.shape[2], moves.shape[3]
    rise = np.zeros(stages)
    for s in range(stages):
        for c in range(count):
            rise[s] = max(rise[s], moves[B, 0, s, c])
            net = moves[B, 0, s, c] - moves[B, 1, s, c]
            if split:
                rise[s] = max(rise[s], moves[I, 0, s, c])
                halves = moves[I, 0, s, c] - moves[I, 1, s, c]
                net = max(net, halves + moves[W, 0, s, c] - moves[W, 1, s, c])
            if head:
                net += moves[G, 0, s, c] - moves[G, 1, s, c]
            if net > 0:
                rise[s] = np.inf
                break
    return rise


@njit(inline="always")
def _first_to_wake(wake, firsts, stale):
    """Return the rank with the earliest ``wake`` time.

    ``firsts`` caches the earliest rank of each block of ranks; blocks marked ``stale`` are updated.
    """
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


class Problem(NamedTuple):
    """Scheduling problem (problem.ScheduleProblem) as arrays with the shapes of engine.OpArrays.

    Attributes:
        seconds: [kinds, stages, chunks] seconds of every op.
        link_seconds: [payloads, links, chunks] seconds of every message.
        latency: latency of a link in seconds.
        moves: [kinds, 2, stages, chunks] bytes that every op allocates and frees.
        backward_order: [chunks] chunks in the order of their backwards.
        last_of_group: [chunks] last chunk whose forward must precede each chunk's backward.
        budget: [ranks] bytes available besides the model states; infinite if memory delays no op.
        rank_of: [stages] int64, rank of every stage.
        by_rank: [stages] stages sorted by rank.
        placed: whether any stage s may be on a rank other than s.
        head: whether ops H and G exist.
    """

    seconds: np.ndarray
    link_seconds: np.ndarray
    latency: float
    moves: np.ndarray
    backward_order: np.ndarray
    last_of_group: np.ndarray
    budget: np.ndarray
    rank_of: np.ndarray
    by_rank: np.ndarray
    placed: bool
    head: bool


RANK = np.dtype(
    [
        ("first_stage", np.int64),  # its stages: by_rank[first_stage:end_stage]
        ("end_stage", np.int64),
        ("all_ops", np.int64),
        ("head_reserve", np.float64),  # most bytes that one H or G of the rank requires
        # The fields below change.
        ("ops", np.int64),  # number of ops run, over all its stages
        ("forwards", np.int64),
        ("backwards", np.int64),
        ("free_at", np.float64),
        ("held", np.float64),  # bytes
        ("peak", np.float64),
        ("deferred_seconds", np.float64),  # of the W and G that can run
        ("deferred_bytes", np.float64),  # bytes that these W and G would free
        ("head_bytes", np.float64),  # bytes that H will allocate, for chunks whose F has run
    ]
)
STAGE = np.dtype(
    [
        ("rise", np.float64),  # result of _rise
        # Numbers of ops run: F, B or I, W, H, G.
        ("forwards", np.int64),
        ("backwards", np.int64),
        ("weights", np.int64),
        ("heads", np.int64),
        ("head_weights", np.int64),
    ]
)
# np.record: attribute access also without compilation (NUMBA_DISABLE_JIT).
RANK, STAGE = (np.dtype((np.record, fields)) for fields in (RANK, STAGE))


class State(NamedTuple):
    """Ranks, stages and messages while a schedule is computed.

    Attributes:
        ranks: [ranks] records of dtype RANK.
        stages: [stages] records of dtype STAGE.
        wake: [ranks] seconds at which a rank chooses its next op; infinite if it has none.
        arrival: [inputs, stages, chunks] seconds at which an input arrives; infinite if unknown.
            Inputs are ACTIVATION, GRADIENT, HEAD, and FORWARD_DONE (end of the stage's own F).
        link_free: [ranks, ranks] seconds until which the link between two ranks is busy.
    """

    ranks: np.ndarray
    stages: np.ndarray
    wake: np.ndarray
    arrival: np.ndarray
    link_free: np.ndarray


class Candidates(NamedTuple):
    """Ops that one rank can run now: for each op kind, the stage of such an op, or -1.

    Attributes:
        forward: stage of an F.
        backward: stage of a B or I.
        weight: stage of a W.
        head: stage of an H.
        head_weight: stage of a G.
        memory_blocks: whether an F has its input but lacks memory.
        b_lacks_memory: whether a B or I lacks memory, even if its input has not arrived.
        next_input: earliest known arrival, in seconds, of an input that the rank waits for;
            infinite if there is none.
    """

    forward: int
    backward: int
    weight: int
    head: int
    head_weight: int
    memory_blocks: bool
    b_lacks_memory: bool
    next_input: float


@njit()
def _initial(problem, limits):
    """Return the state before the first op."""
    moves, rank_of, by_rank = problem.moves, problem.rank_of, problem.by_rank
    count, ranks = moves.shape[3], np.zeros(len(problem.budget), dtype=RANK)
    stages = np.zeros(len(rank_of), dtype=STAGE)
    rise = _rise(moves, limits.split, problem.head)
    for j in range(len(stages)):
        s = by_rank[j]
        stages[s].rise = rise[s]
        rank = ranks[rank_of[s]]
        if rank.all_ops == 0:
            rank.first_stage = j
        rank.end_stage = j + 1
        rank.all_ops += ((3 if limits.split else 2) + (2 if problem.head else 0)) * count
        if problem.head:
            for c in range(count):
                rank.head_reserve = max(rank.head_reserve, moves[H, 1, s, c], moves[G, 0, s, c])
    arrival = np.full((4, len(stages), count), np.inf)
    arrival[ACTIVATION, 0, :] = 0.0
    if not problem.head:
        arrival[GRADIENT, len(stages) - 1, :] = 0.0
    wake, link_free = np.zeros(len(ranks)), np.zeros((len(ranks), len(ranks)))
    return State(ranks, stages, wake, arrival, link_free)


@njit(**INLINED)
def _backward(limits, backwards):
    """Return the kind of a rank's backward after ``backwards`` others: I if it is split, else B."""
    return I if limits.split and backwards >= limits.unsplit else B


@njit(**UNCOUNTED)
def _drain_peak(problem, limits, stage, chunk, back, backwards):
    """Return the bytes by which memory would rise above its present level during backwards.

    The result assumes that backwards run without interruption, from the stage's backward ``back``,
    after ``backwards`` of its rank, to the last group whose forwards end with ``chunk`` or earlier.
    Each W or G runs directly after its I, as under memory pressure.
    """
    moves, order = problem.moves, problem.backward_order
    held, peak = 0.0, 0.0
    for k in range(back, len(order)):
        c = order[k]
        if problem.last_of_group[c] > chunk:
            break
        kind = _backward(limits, backwards + k - back)
        held += moves[kind, 0, stage, c]
        peak = max(peak, held)
        held -= moves[kind, 1, stage, c]
        if kind == I:
            held += moves[W, 0, stage, c] - moves[W, 1, stage, c]
        if problem.head:
            held += moves[G, 0, stage, c] - moves[G, 1, stage, c]
    return peak


@njit(**INLINED)
def _candidates(problem, limits, state, r, now):
    """Return the ops that rank ``r`` can run at time ``now``; if an H can run, only this H."""
    moves, arrival, budget = problem.moves, state.arrival, problem.budget[r]
    rank, count, counted = state.ranks[r], moves.shape[3], limits.least.shape[1]
    forward, backward, weight, head_weight = -1, -1, -1, -1
    memory_blocks, b_lacks_memory, next_input = False, False, np.inf
    if problem.head:
        for j in range(rank.first_stage, rank.end_stage):
            s = problem.by_rank[j]
            h = state.stages[s].heads
            if h < count:
                if arrival[HEAD, s, h] <= now:
                    return Candidates(-1, -1, -1, s, -1, False, False, next_input)
                next_input = min(next_input, arrival[HEAD, s, h])
    b_done = min(rank.backwards, counted - 1)
    for j in range(rank.first_stage, rank.end_stage):
        s = problem.by_rank[j]
        stage = state.stages[s]
        f, b = stage.forwards, stage.backwards
        if f < count and rank.forwards < limits.most[r, b_done]:
            # Memory must suffice for the F and for the backwards that drain memory afterwards.
            held = rank.held + moves[F, 0, s, f]
            if problem.head:
                held += rank.head_bytes + moves[H, 0, s, f] - moves[H, 1, s, f] + rank.head_reserve
            base = held - moves[F, 1, s, f] - rank.deferred_bytes
            if held <= budget and (
                base + stage.rise <= budget
                or base + _drain_peak(problem, limits, s, f, b, rank.backwards) <= budget
            ):
                if arrival[ACTIVATION, s, f] > now:
                    next_input = min(next_input, arrival[ACTIVATION, s, f])
                elif forward < 0 or limits.deep:
                    forward = s
            elif arrival[ACTIVATION, s, f] <= now:
                memory_blocks = True
        if b < count:
            c = problem.backward_order[b]
            enough = rank.forwards >= min(limits.least[r, b_done], counted)
            if f > problem.last_of_group[c] and enough:
                if rank.held + moves[_backward(limits, rank.backwards), 0, s, c] > budget:
                    b_lacks_memory = True
                ready = max(arrival[FORWARD_DONE, s, c], arrival[GRADIENT, s, c])
                if ready > now:
                    next_input = min(next_input, ready)
                elif backward < 0:
                    backward = s
        if limits.split and weight < 0 and stage.weights < b:
            weight = s
        if problem.head and head_weight < 0 and stage.head_weights < b:
            head_weight = s
    return Candidates(
        forward, backward, weight, -1, head_weight, memory_blocks, b_lacks_memory, next_input
    )


@njit(**INLINED)
def _choice(can, problem, limits, state, r, now):
    """Return (kind, stage) of the op that rank ``r`` runs at ``now``; (-1, -1) if it waits."""
    if can.head >= 0:
        return H, can.head
    rank, stages, order = state.ranks[r], state.stages, problem.backward_order
    weight, head_weight = can.weight, can.head_weight
    if (weight >= 0 or head_weight >= 0) and (
        rank.deferred_seconds > limits.held_seconds
        or (can.memory_blocks and can.backward < 0)
        or (can.b_lacks_memory and can.forward < 0)
    ):
        if weight < 0 or (
            head_weight >= 0 and stages[head_weight].head_weights < stages[weight].weights
        ):
            return G, head_weight
        return W, weight
    b_done = min(rank.backwards, limits.first.shape[1] - 1)
    if can.forward >= 0 and (can.backward < 0 or rank.forwards < limits.first[r, b_done]):
        return F, can.forward
    if can.backward >= 0:
        return _backward(limits, rank.backwards), can.backward
    fraction = 1.0 - limits.patience
    if weight >= 0:
        c = order[stages[weight].weights]
        if now + fraction * problem.seconds[W, weight, c] <= can.next_input:
            return W, weight
    if head_weight >= 0:
        c = order[stages[head_weight].head_weights]
        if now + fraction * problem.seconds[G, head_weight, c] <= can.next_input:
            return G, head_weight
    return -1, -1


@njit(**UNCOUNTED)
def _forced_forward(state, rank_of, deep):
    """Return the first stage whose next F has its input, or -1 if there is none.

    With ``deep``, return the last stage on the same rank whose next F has its input.
    """
    first, arrival = -1, state.arrival
    for s in range(len(rank_of)):
        f = state.stages[s].forwards
        has_input = f < arrival.shape[2] and arrival[ACTIVATION, s, f] < np.inf
        if has_input and (first < 0 or (deep and rank_of[s] == rank_of[first])):
            first = s
    return first


@njit(**INLINED)
def _run(kind, s, problem, limits, state, now):
    """Run the next op of ``kind`` on stage ``s``; return (chunk, end time)."""
    seconds, moves, order = problem.seconds, problem.moves, problem.backward_order
    rank, stage = state.ranks[problem.rank_of[s]], state.stages[s]
    if kind == F:
        c = stage.forwards
        stage.forwards += 1
        rank.forwards += 1
        if problem.head:
            rank.head_bytes += moves[H, 0, s, c] - moves[H, 1, s, c]
    elif kind == H:
        c = stage.heads
        stage.heads += 1
        rank.head_bytes -= moves[H, 0, s, c] - moves[H, 1, s, c]
    elif kind == G:
        c = order[stage.head_weights]
        stage.head_weights += 1
        rank.deferred_seconds -= seconds[G, s, c]
        rank.deferred_bytes -= moves[G, 1, s, c] - moves[G, 0, s, c]
    elif kind == W:
        c = order[stage.weights]
        stage.weights += 1
        rank.deferred_seconds -= seconds[W, s, c]
        rank.deferred_bytes -= moves[W, 1, s, c] - moves[W, 0, s, c]
    else:
        c = order[stage.backwards]
        stage.backwards += 1
        rank.backwards += 1
        if problem.head:
            rank.deferred_seconds += seconds[G, s, c]
            rank.deferred_bytes += moves[G, 1, s, c] - moves[G, 0, s, c]
        if kind == I:
            rank.deferred_seconds += seconds[W, s, c]
            rank.deferred_bytes += moves[W, 1, s, c] - moves[W, 0, s, c]
        elif limits.split:  # no W follows
            stage.weights += 1
            rank.all_ops -= 1
    done = now + seconds[kind, s, c]
    if kind == F:
        state.arrival[FORWARD_DONE, s, c] = done
    rank.held += moves[kind, 0, s, c]
    rank.peak = max(rank.peak, rank.held)
    rank.held -= moves[kind, 1, s, c]
    rank.ops += 1
    rank.free_at = done
    state.wake[problem.rank_of[s]] = done if rank.ops < rank.all_ops else np.inf
    return c, done


@njit(**INLINED)
def _send(kind, s, c, done, problem, limits, state):
    """Send an op's output to the op that needs it; return the rank that may now start earlier."""
    r = problem.rank_of[s]
    payload, row, to = _message(kind, s, len(state.stages), problem.head)
    if to < 0:
        return r
    receiver = problem.rank_of[to]
    if receiver == r:
        state.arrival[payload, to, c] = done
        return r
    free = max(done, state.link_free[r, receiver]) + problem.link_seconds[payload, row, c]
    arrives = free + problem.latency
    state.link_free[r, receiver] = free
    state.arrival[payload, to, c] = arrives
    rank = state.ranks[receiver]
    if rank.ops < rank.all_ops:
        state.wake[receiver] = min(state.wake[receiver], max(rank.free_at, arrives))
    return receiver


@njit()
def schedule_with(problem, limits):
    """Schedule all ops of ``problem`` (Problem) under ``limits`` (list_scheduler.Policy).

    Return a tuple of the fields of list_scheduler.Schedule, in order, without ``over_bytes``. The
    time of the iteration is infinite if the schedule cannot be completed.
    """
    rank_of, state = problem.rank_of, _initial(problem, limits)
    ranks, wake = state.ranks, state.wake
    left, width = 0, 0
    for r in range(len(ranks)):
        left += ranks[r].all_ops
        width = max(width, ranks[r].all_ops)
    shape = len(ranks), width
    kinds = np.full(shape, -1, dtype=np.int8)  # -1 after a rank's last op
    chunks = np.zeros(shape, dtype=np.int32)
    on_stage = np.zeros((shape[0], shape[1] if problem.placed else 0), dtype=np.int32)
    start, stop = np.zeros(shape), np.zeros(shape)
    # First rank to wake of every block, and the blocks that must be searched again.
    blocks = (len(ranks) + BLOCK - 1) // BLOCK
    firsts = np.arange(blocks) * BLOCK
    stale = np.zeros(blocks, dtype=np.bool_)
    while left > 0:
        r = _first_to_wake(wake, firsts, stale)
        now = wake[r]
        if now < np.inf:
            stale[r // BLOCK] = True
            can = _candidates(problem, limits, state, r, now)
            kind, s = _choice(can, problem, limits, state, r, now)
            if kind < 0:
                wake[r] = can.next_input
                continue
        else:
            # No rank can go on within its budget: force the first F that has its input.
            kind, s = F, _forced_forward(state, rank_of, limits.deep)
            if s < 0:
                break
            r = rank_of[s]
            stale[r // BLOCK] = True
            now = max(ranks[r].free_at, state.arrival[ACTIVATION, s, state.stages[s].forwards])
        i = ranks[r].ops
        c, done = _run(kind, s, problem, limits, state, now)
        kinds[r, i], chunks[r, i], start[r, i], stop[r, i] = kind, c, now, done
        if problem.placed:
            on_stage[r, i] = s
        left -= 2 if limits.split and kind == B else 1
        stale[_send(kind, s, c, done, problem, limits, state) // BLOCK] = True
    seconds, peaks = (np.inf if left > 0 else 0.0), np.zeros(len(ranks))
    for r in range(len(ranks)):
        peaks[r] = ranks[r].peak
        seconds = max(seconds, ranks[r].free_at)
    return seconds, peaks, kinds, chunks, on_stage, start, stop


@njit()
def strict_orders(limit, backward_order, last_of_group):
    """Return the op kinds and the chunks, both [stages, ops], of the orders that ``limit`` fixes.

    Backward k of stage s follows limit[s, k] forwards. The third value is False, and the arrays are
    incomplete, if a backward would precede a forward that it requires.
    """
    stages, count = limit.shape
    kinds = np.empty((stages, 2 * count), dtype=np.int8)
    chunks = np.empty((stages, 2 * count), dtype=np.int32)
    for s in range(stages):
        f = 0
        for b in range(count):
            while f < min(limit[s, b], count):
                kinds[s, f + b], chunks[s, f + b] = F, f
                f += 1
            c = backward_order[b]
            if f <= last_of_group[c]:
                return kinds, chunks, False
            kinds[s, f + b], chunks[s, f + b] = B, c
    return kinds, chunks, True


@njit()
def replay_of(seconds, link_seconds, latency, moves, kinds, chunks):
    """Simulate given orders of ops, with one stage per rank; see replay.replayed.

    Return the seconds of the iteration (infinite if the orders deadlock), peak bytes [stages]
    without model states, and start and stop times [stages, ops] in seconds. The orders must satisfy
    the dependencies within each stage, so that ops wait only for messages.

    Args:
        seconds: [kinds, stages, chunks] seconds of every op.
        link_seconds: [payloads, links, chunks] seconds of every message.
        latency: latency of a link in seconds.
        moves: [kinds, 2, stages, chunks] bytes that every op allocates and frees.
        kinds: [stages, ops] op kinds in order, or NOTHING.
        chunks: [stages, ops] chunks of these ops.
    """
    stages, count = seconds.shape[1:]
    per_stage = kinds.shape[1]
    start, stop = np.zeros((stages, per_stage)), np.zeros((stages, per_stage))
    head = len(link_seconds) > HEAD  # vocabulary parallelism
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
                if kind == NOTHING:
                    at[s] += 1
                    left -= 1
                    continue
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
