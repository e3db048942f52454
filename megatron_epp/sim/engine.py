"""Compiled loop of the simulator: exact event times and memory from arrays.

A rank runs one op at a time, of any of its stages. An op starts when its rank has finished the
previous op and all inputs of the op have arrived. An input from another rank is a message. A
message departs when its producer has finished and its link is free. Every ordered pair of ranks has
one link. The message occupies the link for its link seconds, and arrives one latency later. Sends
do not block a rank. The rule table (ir.rules) defines which ops an op waits for, and which bytes it
allocates and frees.
"""

from typing import NamedTuple

import numpy as np

from megatron_epp.sim.jit import njit

# Codes in the arrays. All of them are defined in this file, because numba's cache of compiled code
# only detects changes of a function's own file.
SAME, EARLIER, LATER = 0, 1, 2  # ir.Relation
NEED_KIND, NEED_MET_BY, NEED_STAGE, NEED_CHUNK, NEED_PAYLOAD, NEED_POSITION = range(6)
FROM_LAST = 1 << 30  # in place of a stage step: the last stage meets the need
ANYWHERE, ON_FIRST, ON_LAST, BEFORE_LAST = 0, 1, 2, 3  # ir.StagePosition


class Orders(NamedTuple):
    """Ops of all ranks in order, as flat arrays over the ranks.

    Attributes:
        kind: int8 [ops], code of the op kind (ir.KIND_CODE).
        chunk: int64 [ops], chunk of the op.
        stage: int64 [ops], stage of the op.
        offset: int64 [ranks + 1]; rank r has ops offset[r] to offset[r + 1] - 1.
        rank_of: int64 [stages], rank of each stage.
    """

    kind: np.ndarray
    chunk: np.ndarray
    stage: np.ndarray
    offset: np.ndarray
    rank_of: np.ndarray


class OpArrays(NamedTuple):
    """Seconds and bytes of every op that a plan may have, and the order of slices.

    The arrays do not depend on the order of ops. The simulator and the planner's search read them.
    Dimensions: K op kinds, S stages, C chunks, P payloads, L links; float64 unless stated
    otherwise.

    Attributes:
        seconds: [K, S, C], op kinds by ir.KIND_CODE; B and I include recompute.
        link_seconds: [P, L, C], payloads in the order of ir.Payload. Link l joins stages l and
            l + 1. With vocabulary parallelism, the last link leads from the last stage to the
            first. With one stage, there is one link of zeros.
        latency: seconds of every message in addition to its link seconds.
        moved_bytes: [K, 2, S, C], bytes that an op allocates at its start (index 0) and frees at
            its stop (index 1).
        resident: [S], bytes of model states and buffers.
        earlier: int64 [C], chunk with the preceding slice of the document (ir.Slices), or -1.
    """

    seconds: np.ndarray
    link_seconds: np.ndarray
    latency: float
    moved_bytes: np.ndarray
    resident: np.ndarray
    earlier: np.ndarray


class Run(NamedTuple):
    """Events of a simulation: N ops in the order of ``Orders``, M messages in the order of sending.

    Attributes:
        seconds: makespan in seconds. If a rank waits forever, this is infinite, and the other
            fields are invalid.
        peak: [ranks], peak bytes, including the resident bytes of all stages of the rank.
        left: [ranks], bytes at the end without the resident bytes; 0 for a complete plan.
        start: [N], start time in seconds.
        stop: [N], end time in seconds.
        op_peak: [N], bytes on the op's rank while it runs.
        op_left: [N], bytes on the op's rank after it.
        need: [N], row of ``needs`` with the dependency that was satisfied last, or -1.
        source: [N], op that satisfied this dependency, or -1.
        message: [N], message that satisfied this dependency, or -1.
        producer: [M], op that makes the message.
        consumer: [M], op that needs the message.
        ready: [M], seconds at which the message is made.
        depart: [M], seconds at which the message enters the link.
        arrive: [M], seconds at which the message arrives.
        before: [M], message that this message waited for on the link, or -1.
    """

    seconds: float
    peak: np.ndarray
    left: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    op_peak: np.ndarray
    op_left: np.ndarray
    need: np.ndarray
    source: np.ndarray
    message: np.ndarray
    producer: np.ndarray
    consumer: np.ndarray
    ready: np.ndarray
    depart: np.ndarray
    arrive: np.ndarray
    before: np.ndarray


def run(orders: Orders, arrays: OpArrays, needs: np.ndarray) -> Run:
    """Simulate ``orders``, in which a stage runs at most one op of each kind on a chunk.

    Args:
        orders: ops of all ranks.
        arrays: seconds and bytes of the ops.
        needs: int64 [rows, 6], one row per dependency between ops (rule_arrays.needs_array).
            An op w waits for ops p. Columns: kind of w; kinds of p, as bits; stage of p minus stage
            of w, or ``FROM_LAST``; code of the Relation of p's chunk to w's chunk; code of the
            payload that p sends if it is on another stage; code of the stages of w that have the
            dependency. Rows for a kind of w that ``arrays`` does not contain, such as I and W if
            backwards are not split, are ignored.
    """
    # Compiled code does not check bounds: such a kind would index past the arrays.
    needs = needs[needs[:, NEED_KIND] < len(arrays.seconds)]
    return Run(*run_arrays(orders, arrays, needs))


@njit()
def _lists(mask):
    """Return (lists, counts): lists[k, :counts[k]] contains the columns with mask[k] true."""
    lists = np.zeros(mask.shape, np.int64)
    counts = np.zeros(mask.shape[0], np.int64)
    for k in range(mask.shape[0]):
        for row in range(mask.shape[1]):
            if mask[k, row]:
                lists[k, counts[k]] = row
                counts[k] += 1
    return lists, counts


@njit()
def _relatives(earlier):
    """Return (related, child, sibling); chunk c continues chunk ``earlier[c]`` (-1: no chunk).

    ``related[r, c]`` is the number of chunks in relation r to chunk c. The chunks that continue c
    (several if documents branch) form a linked list. It starts at ``child[c]``, and the chunk after
    chunk k is ``sibling[k]``.
    """
    width = len(earlier)
    related = np.zeros((3, width), np.int64)
    related[SAME] = 1
    child = np.full(width, -1, np.int64)
    sibling = np.full(width, -1, np.int64)
    for chunk in range(width - 1, -1, -1):
        parent = earlier[chunk]
        if parent >= 0:
            related[EARLIER, chunk] = 1
            related[LATER, parent] += 1
            sibling[chunk] = child[parent]
            child[parent] = chunk
    return related, child, sibling


@njit()
def _rows_by_kind(needs, codes):
    """Return row numbers of ``needs`` (dependencies) by op kind: (own, owns, met, mets).

    Rows own[k, :owns[k]] are the dependencies of ops of kind k on other ops. Rows met[k, :mets[k]]
    are the dependencies of other ops on ops of kind k.
    """
    mask = np.zeros((2, codes, len(needs)), np.bool_)
    for row in range(len(needs)):
        mask[0, needs[row, NEED_KIND], row] = True
        for kind in range(codes):
            mask[1, kind, row] = (needs[row, NEED_MET_BY] >> kind) & 1
    own, owns = _lists(mask[0])
    met, mets = _lists(mask[1])
    return own, owns, met, mets


@njit()
def _missing(orders, needs, own, owns, met_on, related):
    """Return how many ops each op waits for, as [ops], and the total number on another rank."""
    kinds, chunks, op_stage, rank_of = orders.kind, orders.chunk, orders.stage, orders.rank_of
    missing = np.zeros(len(kinds), np.int64)
    remote = 0
    for op in range(len(kinds)):
        kind, stage = kinds[op], op_stage[op]
        for index in range(owns[kind]):
            row = own[kind, index]
            where = met_on[row, stage]
            if where < 0:
                continue
            wanted = related[needs[row, NEED_CHUNK], chunks[op]]
            missing[op] += wanted
            if rank_of[where] != rank_of[stage]:
                remote += wanted
    return missing, remote


@njit()
def _places(needs, stages):
    """Return (met_on, wanted_on), both [rows, stages]: the other stage of each dependency, or -1.

    A row is a dependency. An op on ``stage`` waits for an op on stage met_on[row, stage]. An op on
    stage wanted_on[row, stage] waits for an op on ``stage``. -1: there is no such dependency.
    """
    met_on = np.full((len(needs), stages), -1, np.int64)
    wanted_on = np.full((len(needs), stages), -1, np.int64)
    for row in range(len(needs)):
        position = needs[row, NEED_POSITION]
        for stage in range(stages):
            if position == ON_FIRST and stage != 0:
                continue
            if position == ON_LAST and stage != stages - 1:
                continue
            if position == BEFORE_LAST and stage == stages - 1:
                continue
            where = stage + needs[row, NEED_STAGE]
            if needs[row, NEED_STAGE] == FROM_LAST:
                where = stages - 1
            if where >= 0 and where < stages:
                met_on[row, stage] = where
                wanted_on[row, where] = stage
    return met_on, wanted_on


@njit()
def run_arrays(orders, arrays, needs):
    """Simulate ``orders``; return the fields of :class:`Run` as a tuple.

    The loop only reads local arrays. If it passed tuples of arrays to functions, numba would count
    references for every op. This counting took two thirds of the time.
    """
    kinds, chunks, op_stage, offset = orders.kind, orders.chunk, orders.stage, orders.offset
    rank_of = orders.rank_of
    seconds, link_seconds, latency = arrays.seconds, arrays.link_seconds, arrays.latency
    moved_bytes = arrays.moved_bytes
    codes, stages, width = seconds.shape
    ops, ranks = len(kinds), len(offset) - 1

    earlier = arrays.earlier
    related, child, sibling = _relatives(earlier)
    own, owns, met, mets = _rows_by_kind(needs, codes)
    met_on, wanted_on = _places(needs, stages)
    missing, remote = _missing(orders, needs, own, owns, met_on, related)

    place = np.full((codes, stages, width), -1, np.int64)  # the op's number, -1: none
    for op in range(ops):
        place[kinds[op], op_stage[op], chunks[op]] = op

    start, stop = np.zeros(ops), np.zeros(ops)
    op_peak, op_left = np.zeros(ops), np.zeros(ops)
    arrived = np.full(ops, -1.0)
    need = np.full(ops, -1, np.int64)
    source = np.full(ops, -1, np.int64)
    brought = np.full(ops, -1, np.int64)
    producer = np.full(remote, -1, np.int64)
    consumer = np.full(remote, -1, np.int64)
    ready, depart, arrive = np.zeros(remote), np.zeros(remote), np.zeros(remote)
    before = np.full(remote, -1, np.int64)
    sent = 0
    # By rank of the sender and of the receiver.
    link_free = np.zeros((ranks, ranks))
    link_last = np.full((ranks, ranks), -1, np.int64)

    at = offset[:-1].copy()
    free = np.zeros(ranks)
    resident = np.zeros(ranks)
    for stage in range(stages):
        resident[rank_of[stage]] += arrays.resident[stage]
    held = resident.copy()
    peak = resident.copy()
    pending = ops
    makespan = 0.0
    while pending > 0:
        before_round = pending
        for rank in range(ranks):
            while at[rank] < offset[rank + 1] and missing[at[rank]] == 0:
                op = at[rank]
                kind, chunk, stage = kinds[op], chunks[op], op_stage[op]
                begin = max(free[rank], arrived[op])
                end = begin + seconds[kind, stage, chunk]
                start[op], stop[op] = begin, end
                free[rank] = end
                makespan = max(makespan, end)
                at[rank] += 1
                pending -= 1

                held[rank] += moved_bytes[kind, 0, stage, chunk]
                op_peak[op] = held[rank]
                peak[rank] = max(peak[rank], held[rank])
                held[rank] -= moved_bytes[kind, 1, stage, chunk]
                op_left[op] = held[rank]

                for index in range(mets[kind]):
                    row = met[kind, index]
                    where = wanted_on[row, stage]
                    if where < 0:
                        continue
                    relation = needs[row, NEED_CHUNK]
                    waiting = chunk
                    if relation == EARLIER:
                        waiting = child[chunk]
                    elif relation == LATER:
                        waiting = earlier[chunk]
                    following = waiting
                    while following >= 0:
                        waiting = following
                        following = sibling[waiting] if relation == EARLIER else -1
                        target = place[needs[row, NEED_KIND], where, waiting]
                        if target < 0:
                            continue
                        arrival = end
                        message = -1
                        other = rank_of[where]
                        if other != rank:
                            length = min(stage, where)
                            if needs[row, NEED_STAGE] == FROM_LAST:
                                length = stages - 1
                            message = sent
                            sent += 1
                            producer[message], consumer[message] = op, target
                            ready[message] = end
                            depart[message] = max(end, link_free[rank, other])
                            if depart[message] > end:
                                before[message] = link_last[rank, other]
                            payload = needs[row, NEED_PAYLOAD]
                            occupied = link_seconds[payload, length, chunk]
                            link_free[rank, other] = depart[message] + occupied
                            link_last[rank, other] = message
                            arrive[message] = link_free[rank, other] + latency
                            arrival = arrive[message]
                        missing[target] -= 1
                        if arrival > arrived[target]:
                            arrived[target] = arrival
                            need[target] = row
                            source[target] = op
                            brought[target] = message
        if pending == before_round:
            makespan = np.inf
            break

    left = held - resident
    return (
        makespan,
        peak,
        left,
        start,
        stop,
        op_peak,
        op_left,
        need,
        source,
        brought,
        producer,
        consumer,
        ready,
        depart,
        arrive,
        before,
    )
