"""Messages that are on a GPU beside its ops.

From where it is posted or sent until it has arrived, a message is a kernel that holds a few of the
GPU's multiprocessors, mostly to wait for its other end. A product beside it may take much longer,
which no seconds of the cost model know: scripts/gpu/held_sms.py measures how much.

    op        |  F0  |  F1  |      B0      |      share of B0, F1 and F0: 2/3
    message         [ B0<1 -- waits -]
"""

from collections.abc import Iterable

from megatron_epp.ir import Message, Op, Post, StageOp, lower
from megatron_epp.sim.play import Simulation

# [start, stop) seconds
Interval = tuple[float, float]


def resident_ratios(played: Simulation) -> tuple[float, ...]:
    """Share of every rank's compute time that passes beside a message, with messages issued where
    the plan's programs have them."""
    times = {(record.stage, record.op): record for record in played.records}
    flights = {flight.message: flight for flight in played.flights}
    programs = lower(played.plan)
    ops: list[list[Interval]] = [[] for _ in programs]
    posts: dict[Message, float] = {}
    for rank, program in enumerate(programs):
        free = 0.0
        for item in program:
            if isinstance(item, (Op, StageOp)):
                place = (rank, item) if isinstance(item, Op) else (item.stage, item.op)
                ops[rank].append((times[place].start, times[place].stop))
                free = times[place].stop
            elif isinstance(item, Post):
                posts[item.message] = free
    held: list[list[Interval]] = [[] for _ in programs]
    for message, flight in flights.items():
        source, target = message.link
        stop = max(flight.arrive, posts[message])
        held[source].append((flight.ready, stop))
        held[target].append((posts[message], stop))
    return tuple(map(extra_ratio, ops, held))


def extra_ratio(ops: Iterable[Interval], held: Iterable[Interval]) -> float:
    """Share of the time of ``ops``, which follow one another, that lies in any of ``held``."""
    merged: list[list[float]] = []
    for start, stop in sorted(held):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    total = overlapped = 0.0
    first = 0
    for start, stop in ops:
        total += stop - start
        while first < len(merged) and merged[first][1] <= start:
            first += 1
        at = first
        while at < len(merged) and merged[at][0] < stop:
            begin, end = merged[at]
            overlapped += max(0.0, min(stop, end) - max(start, begin))
            at += 1
    return overlapped / total if total else 0.0
