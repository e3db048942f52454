"""Fraction of compute time during which messages occupy part of a GPU ("resident" messages).

A message is a kernel on both GPUs. It runs from the send, or from the post of the receive, until
the message arrives, and it occupies a few multiprocessors. Most of this time, it waits for the
other rank. A matrix product that runs at the same time may take much longer. The cost model does
not include this effect, which scripts/gpu/held_sms.py measures.

    op        |  F0  |  F1  |      B0      |      ratio for B0, F1 and F0: 2/3
    message         [ B0<1 -- waits -]
"""

from collections.abc import Iterable

from megatron_epp.ir import Message, Op, Post, StageOp, lower
from megatron_epp.sim.play import Simulation

# (start, stop) in seconds.
Interval = tuple[float, float]


def resident_ratios(played: Simulation) -> tuple[float, ...]:
    """Return, for every rank, the fraction of compute time during which messages occupy the GPU.

    The plan's lowered programs (ir.lower) determine when messages are posted.
    """
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
    """Return the fraction of the total time of ``ops`` (in order) that overlaps with ``held``."""
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
