"""Chrome trace of a run, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each rank is shown as a process with a thread for its ops, a thread for its transfers if they were
recorded, a thread for its bubbles, and a counter of its bytes. Arrows lead from an op to the ops of
other ranks that need its output.
"""

import json
from collections.abc import Iterator
from typing import Any

from megatron_epp.ir import Timed, needs_of
from megatron_epp.show.colours import FAMILIES
from megatron_epp.show.reasons import op_of
from megatron_epp.show.timeline import (
    Bubble,
    Timeline,
    chunk_names,
    offloaded_fraction,
    recomputed_fraction,
)
from megatron_epp.show.units import GIB

_MICRO = 1e6  # times of the format are in microseconds
_OPS, _TRANSFERS, _IDLE = 0, 1, 2


def to_trace(timeline: Timeline) -> str:
    """Return the trace as JSON text."""
    events = [*_names(timeline), *_ops(timeline), *_arrows(timeline), *_bytes(timeline)]
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    idle = {bubble.rank for bubble in timeline.bubbles}
    for rank in range(timeline.ranks):
        yield _meta("process_name", rank, _OPS, name=timeline.plan.rank_name(rank))
        yield _meta("process_sort_index", rank, _OPS, sort_index=rank)
        yield _meta("thread_name", rank, _OPS, name="ops")
        if timeline.transfers:
            yield _meta("thread_name", rank, _TRANSFERS, name="transfers")
        if rank in idle:
            yield _meta("thread_name", rank, _IDLE, name="idle")


def _meta(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _ops(timeline: Timeline) -> Iterator[dict[str, Any]]:
    names = chunk_names(timeline.plan)
    critical = set(timeline.critical)
    for record in timeline.records:
        chunk, rank = record.op.chunk, timeline.rank_of(record)
        content = timeline.plan.chunks[chunk]
        args = {
            "chunk": chunk,
            "holds": names[chunk],
            "spans": str(content),
            "tokens": content.tokens,
            "pairs": timeline.plan.pairs(chunk),
            "peak_gib": round(record.peak_bytes / GIB, 4),
            "recomputed_layers": timeline.plan.recompute[record.stage][chunk],
            "recomputed_share": recomputed_fraction(timeline.plan, record.stage, chunk),
            "offloaded_share": offloaded_fraction(timeline.plan, record.stage, chunk),
            "critical": (record.stage, record.op) in critical,
        }
        yield {
            **_span(rank, _OPS, timeline.name(record), record),
            "cat": FAMILIES[record.op.kind].name,
            "cname": FAMILIES[record.op.kind].trace,
            "args": args,
        }
    for record in timeline.transfers:
        span = _span(timeline.rank_of(record), _TRANSFERS, str(record.op), record)
        yield {**span, "cat": FAMILIES[record.op.kind].name}
    for bubble in timeline.bubbles:
        yield {**_span(bubble.rank, _IDLE, bubble.reason or "idle", bubble), "cat": "idle"}


def _span(rank: int, thread: int, name: str, of: Timed | Bubble) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": round(of.start * _MICRO, 3),
        "dur": round((of.stop - of.start) * _MICRO, 3),
    }


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield two events (begin and end of an arrow) for every input from an op of another rank."""
    needs, rank_of = needs_of(timeline.plan), timeline.plan.rank_of
    ran = {(record.stage, op_of(record)): record for record in timeline.records}
    number = 0
    for (stage, op), record in ran.items():
        for need, where, ops in needs(stage, op):
            if rank_of[where] == rank_of[stage]:
                continue
            for other in ops:
                source = ran.get((where, other))
                if source is None:
                    continue
                number += 1
                common = {"cat": "needs", "name": need.why, "id": number, "tid": _OPS}
                begin = round(source.stop * _MICRO, 3)
                yield {"ph": "s", "pid": rank_of[source.stage], "ts": begin, **common}
                end = round(record.start * _MICRO, 3)
                yield {"ph": "f", "bp": "e", "pid": rank_of[stage], "ts": end, **common}


def _bytes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, curve in enumerate(timeline.curves):
        for seconds, held in curve:
            yield {
                "ph": "C",
                "name": "GiB alive",
                "pid": rank,
                "ts": round(seconds * _MICRO, 3),
                "args": {"GiB": round(held / GIB, 4)},
            }
