"""A run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A stage is a process with a thread for its ops, one for its transfers where they were recorded,
and a counter of its bytes. Arrows lead from an op to the op of another stage that needed it.
"""

import json
from collections.abc import Iterator
from typing import Any

from megatron_epp.ir import needs_of
from megatron_epp.show.colours import FAMILIES
from megatron_epp.show.reasons import op_of
from megatron_epp.show.timeline import Timeline, chunk_names, offloaded_share, recomputed_share
from megatron_epp.show.units import GIB

_MICRO = 1e6  # the format counts microseconds
_OPS, _TRANSFERS, _IDLE = 0, 1, 2
# Names of the format's own colours.
_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_runnable",
    "I": "rail_animation",
    "W": "rail_load",
    "H": "rail_response",
    "G": "cq_build_passed",
}


def to_trace(timeline: Timeline) -> str:
    """JSON text."""
    events = [*_names(timeline), *_ops(timeline), *_arrows(timeline), *_bytes(timeline)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    idle = {bubble.stage for bubble in timeline.bubbles}
    for stage in range(timeline.stages):
        yield _meta("process_name", stage, _OPS, name=f"stage {stage}")
        yield _meta("process_sort_index", stage, _OPS, sort_index=stage)
        yield _meta("thread_name", stage, _OPS, name="ops")
        if timeline.transfers:
            yield _meta("thread_name", stage, _TRANSFERS, name="transfers")
        if stage in idle:
            yield _meta("thread_name", stage, _IDLE, name="idle")


def _meta(what: str, stage: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": stage, "tid": thread, "args": args}


def _ops(timeline: Timeline) -> Iterator[dict[str, Any]]:
    names = chunk_names(timeline.plan)
    critical = set(timeline.critical)
    for record in timeline.records:
        chunk = record.op.chunk
        content = timeline.plan.chunks[chunk]
        args = {
            "chunk": chunk,
            "holds": names[chunk],
            "spans": str(content),
            "tokens": content.tokens,
            "pairs": content.pairs,
            "peak_gib": round(record.peak_bytes / GIB, 4),
            "recomputed_layers": timeline.plan.recompute[record.stage][chunk],
            "recomputed_share": recomputed_share(timeline.plan, record.stage, chunk),
            "offloaded_share": offloaded_share(timeline.plan, record.stage, chunk),
            "critical": (record.stage, record.op) in critical,
        }
        yield {
            **_span(record.stage, _OPS, str(record.op), record.start, record.stop),
            "cat": FAMILIES[record.op.kind].name,
            "cname": _COLOURS[record.op.kind.value],
            "args": args,
        }
    for record in timeline.transfers:
        yield {
            **_span(record.stage, _TRANSFERS, str(record.op), record.start, record.stop),
            "cat": FAMILIES[record.op.kind].name,
        }
    for bubble in timeline.bubbles:
        name = bubble.reason or "idle"
        yield {**_span(bubble.stage, _IDLE, name, bubble.start, bubble.stop), "cat": "idle"}


def _span(stage: int, thread: int, name: str, start: float, stop: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": stage,
        "tid": thread,
        "ts": round(start * _MICRO, 3),
        "dur": round((stop - start) * _MICRO, 3),
    }


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """One for every need that another stage meets."""
    needs = needs_of(timeline.plan)
    ran = {(record.stage, op_of(record)): record for record in timeline.records}
    number = 0
    for (stage, op), record in ran.items():
        for need, where, ops in needs(stage, op):
            if where == stage:
                continue
            for other in ops:
                source = ran.get((where, other))
                if source is None:
                    continue
                number += 1
                common = {"cat": "needs", "name": need.why, "id": number, "tid": _OPS}
                begin = round(source.stop * _MICRO, 3)
                yield {"ph": "s", "pid": source.stage, "ts": begin, **common}
                end = round(record.start * _MICRO, 3)
                yield {"ph": "f", "bp": "e", "pid": stage, "ts": end, **common}


def _bytes(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for stage, curve in enumerate(timeline.curves):
        for seconds, held in curve:
            yield {
                "ph": "C",
                "name": "GiB alive",
                "pid": stage,
                "ts": round(seconds * _MICRO, 3),
                "args": {"GiB": round(held / GIB, 4)},
            }
