"""Drawings of one timeline (predicted or measured), or of several timelines on one time axis.

    title, totals
    legend
    stage 0 |F0 F1 F2   B2 B1 B0|     one row per rank, with idle time
    stage 1 |   F0 F1 ...       |
             0 s    0.5    1.0
    memory of each rank and its budget, on the same time axis

Names and numbers are at the left, because the right end of a wide picture may not be visible.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.ir import Kind, Timed
from megatron_epp.show import colours
from megatron_epp.show.colours import FAMILIES, Palette, palette
from megatron_epp.show.reasons import op_of
from megatron_epp.show.shapes import Drawing, Label, Path, Rect, Shape, text_width
from megatron_epp.show.timeline import (
    Timeline,
    chunk_names,
    offloaded_fraction,
    offloaded_text,
    recomputes,
)
from megatron_epp.show.units import GIB, bytes_text, fraction_text, tokens_text

# In pixels, except _NUMBERED. A picture is so wide that this fraction of its ops can show numbers,
# but at most WIDEST, to fit a screen, unless a width is given. HTML pages (page.py) have zoom.
_NARROWEST, WIDEST = 1400.0, 2400.0
_NUMBERED = 0.8
_LEFT, _RIGHT = 196.0, 28.0
_TITLE, _TEXT, _SMALL, _LEAST = 17.0, 12.0, 10.5, 8.0
_PADDING = 3.0  # total horizontal space around a bar's label
_PER_TICK = 110.0
_ROW_GAP = 5.0
_CRITICAL = 2.5
_LINK = 0.8  # thickness of the line between two ops of the critical path
_TWO_LINES = 26.0  # a row of this height has space for two lines of text
_TRANSFER = 0.3  # of a row's height; the ops of the stage are drawn above
_ACCENT = 3.0


@dataclass(frozen=True, slots=True)
class _Axis:
    """Scale from seconds to pixels, the same for all panels of a drawing."""

    stop: float
    left: float
    right: float

    def x(self, seconds: float) -> float:
        if not self.stop:
            return self.left
        return self.left + (self.right - self.left) * seconds / self.stop

    @property
    def ticks(self) -> int:
        """Largest number of ticks that fit on the axis."""
        return max(1, int((self.right - self.left) / _PER_TICK))


def draw_timelines(*timelines: Timeline, width: float | None = None) -> Drawing:
    """Return the drawing of one run, or of several on one time axis, one below the other.

    A run has rows of ops, and memory curves if its timeline has any.

    Args:
        *timelines: runs to draw, at least one; the legend shows the chunks of the first plan.
        width: width in pixels; default: enough for chunk numbers on 80% of the bars, but at least
            1400 and at most ``WIDEST``.
    """
    if width is None:
        width = _width(timelines)
    axis = _Axis(max(t.seconds for t in timelines), _LEFT, width - _RIGHT)
    shapes: list[Shape] = []
    y = 14.0
    entries, y = _legend(timelines, min(width, _NARROWEST), y)
    shapes += entries
    y += 8
    for timeline in timelines:
        block, y = _block(timeline, axis, width, y)
        shapes += block
        y += 14
    return Drawing(width, y, tuple(shapes))


def _width(timelines: Sequence[Timeline]) -> float:
    per_second = sorted(
        (text_width(timeline.name(record)[1:], _LEAST) + _PADDING) / record.seconds
        for timeline in timelines
        for record in timeline.records
        if record.seconds
    )
    if not per_second:
        return _NARROWEST
    enough = per_second[math.ceil(_NUMBERED * len(per_second)) - 1]
    width = _LEFT + enough * max(t.seconds for t in timelines) + _RIGHT
    return max(_NARROWEST, min(WIDEST, math.ceil(width)))


def _block(timeline: Timeline, axis: _Axis, width: float, y: float) -> tuple[list[Shape], float]:
    shapes: list[Shape] = []
    y += 16
    heading = timeline.title or "plan"
    shapes.append(Label(14, y, heading, _TITLE, colours.INK, bold=True))
    row = max(14.0, min(34.0, 320.0 / timeline.ranks))
    numbers = (
        f"{timeline.time_text(timeline.seconds)}  |  bubbles "
        f"{fraction_text(timeline.bubble_ratio)}  |  {timeline.summary}, "
        f"{len(timeline.plan.documents)} documents, {tokens_text(timeline.plan.tokens)} "
        f"tokens{offloaded_text(timeline.plan)}"
    )
    if lost := _lost(timeline, axis, row):
        numbers += f"  |  {lost} ops too short for their number: draw -o x.html"
    x = max(_LEFT, 14 + text_width(heading, 1.2 * _TITLE)) + 24
    shapes.append(Label(x, y, numbers, _TEXT, colours.QUIET_INK))
    y += 12
    top = y
    bottom = top + timeline.ranks * (row + _ROW_GAP) - _ROW_GAP
    shapes += _grid(timeline, axis, top, bottom)
    shapes += _rows(timeline, axis, top, row)
    y = bottom + 15
    for place, label in timeline.ticks(axis.ticks, axis.stop):
        shapes.append(Label(axis.x(place), y, label, _SMALL, colours.QUIET_INK, "middle"))
    y += 10
    if timeline.curves:
        block, y = _memory(timeline, axis, y + 8)
        shapes += block
    return shapes, y


def _grid(timeline: Timeline, axis: _Axis, top: float, bottom: float) -> Iterator[Shape]:
    for place, _ in timeline.ticks(axis.ticks, axis.stop):
        x = axis.x(place)
        yield Path(((x, top - 3), (x, bottom + 3)), colours.GRID, 1)


def _rows(timeline: Timeline, axis: _Axis, top: float, row: float) -> Iterator[Shape]:
    paints = palette(timeline.plan)
    names = chunk_names(timeline.plan)
    idle = [max(0.0, timeline.seconds - busy) for busy in timeline.busy]
    for rank in range(timeline.ranks):
        y = top + rank * (row + _ROW_GAP)
        idle_fraction = idle[rank] / timeline.seconds if timeline.seconds else 0.0
        yield from _next_to(
            timeline.plan.rank_name(rank), f"{fraction_text(idle_fraction)} idle", y, row
        )
        yield Rect(axis.left, y, axis.x(timeline.seconds) - axis.left, row, colours.IDLE)
    for bubble in timeline.bubbles:
        if bubble.reason:
            x, y = axis.x(bubble.start), top + bubble.rank * (row + _ROW_GAP)
            text = f"idle {timeline.time_text(bubble.seconds)}: {bubble.reason}"
            yield Rect(x, y, axis.x(bubble.stop) - x, row, colours.IDLE, title=text)
    for record in timeline.transfers:
        x, right = axis.x(record.start), axis.x(record.stop)
        y = top + (timeline.rank_of(record) * (row + _ROW_GAP)) + row * (0.5 - _TRANSFER / 2)
        text = f"{record.op} on stage {record.stage}: {timeline.time_text(record.seconds)}"
        colour = FAMILIES[record.op.kind].plain
        yield Rect(x, y, max(right - x, 0.5), row * _TRANSFER, colour, title=text)
    # If nearly all bars have space for F12, bars show F12; otherwise all show 12.
    full = _fitting(timeline, axis, row, 0) >= _NUMBERED * len(timeline.records)
    for record in timeline.records:
        y = top + timeline.rank_of(record) * (row + _ROW_GAP)
        yield from _bar(timeline, axis, paints, names, record, y, row, full)
    yield from _critical(timeline, axis, top, row)


def _next_to(name: str, numbers: str, y: float, height: float, colour: str = "") -> Iterator[Shape]:
    """Yield the name of a rank and its numbers, at the left of its row."""
    x, middle = _LEFT - 10, y + height / 2 + 4
    quiet = colour or colours.QUIET_INK
    if height >= _TWO_LINES:
        yield Label(x, middle - 6, name, _TEXT, colours.INK, "end")
        yield Label(x, middle + 8, numbers, _SMALL, quiet, "end", bold=bool(colour))
        return
    yield Label(x, middle, numbers, _SMALL, quiet, "end", bold=bool(colour))
    yield Label(14, middle, name, _SMALL, colours.INK)


def _critical(timeline: Timeline, axis: _Axis, top: float, row: float) -> Iterator[Shape]:
    """Yield the critical path: a line under each op's bar, and thin lines between the ops.

    Outlines around the bars would cover bars of a few pixels. Without the thin lines, short ops
    would look like separate dots.
    """
    ran = {(record.stage, record.op): record for record in timeline.records}
    before: tuple[float, float] | None = None
    for key in timeline.critical:
        record = ran.get(key)
        if record is None:
            continue
        y = top + timeline.rank_of(record) * (row + _ROW_GAP) + row + 0.5
        x, right = axis.x(record.start), axis.x(record.stop)
        if before is not None:
            middle = y + _CRITICAL / 2
            yield Path((before, (x, middle)), colours.CRITICAL, _LINK)
        before = right, y + _CRITICAL / 2
        yield Rect(x, y, max(right - x, 0.5), _CRITICAL, colours.CRITICAL)


def _label_size(text: str, width: float, row: float) -> float:
    """Return the maximum font size at which ``text`` fits on a bar, all sizes in pixels."""
    return min(_TEXT, row * 0.6, (width - _PADDING) / text_width(text, 1.0))


def _fits(text: str, width: float, row: float) -> bool:
    return _label_size(text, width, row) >= _LEAST - 1e-9


def _fitting(timeline: Timeline, axis: _Axis, row: float, first: int) -> int:
    """Return the number of bars with space for the op's name from character ``first`` on."""
    return sum(
        _fits(timeline.name(r)[first:], axis.x(r.stop) - axis.x(r.start), row)
        for r in timeline.records
    )


def _lost(timeline: Timeline, axis: _Axis, row: float) -> int:
    """Return the number of bars that are too narrow for a label, or 0 if there are few of them."""
    bars = len(timeline.records)
    lost = bars - _fitting(timeline, axis, row, 1)
    return lost if lost > (1 - _NUMBERED) * bars else 0


def _bar(
    timeline: Timeline,
    axis: _Axis,
    paints: Palette,
    names: tuple[str, ...],
    record: Timed,
    y: float,
    row: float,
    full: bool,
) -> Iterator[Shape]:
    op = op_of(record)
    x, right = axis.x(record.start), axis.x(record.stop)
    width = right - x
    # A thin gap between adjacent bars that are wide enough.
    inner = width - 0.6 if width > 3 else width
    title = hover(timeline, names, record)
    yield Rect(x, y, inner, row, paints.fill(op.kind, op.chunk), title=title)
    if accent := paints.accent[op.chunk]:
        yield Rect(x, y, inner, _ACCENT, accent)
    if recomputed_part := timeline.recomputed(record):
        height = max(2.5, 0.45 * row * recomputed_part)
        yield Rect(x, y + row - height, inner, height, colours.RECOMPUTE)
    text = timeline.name(record) if full else timeline.name(record)[1:]
    if _fits(text, width, row):
        size, colour = _label_size(text, width, row), paints.ink(op.chunk)
        yield Label(x + width / 2, y + row / 2 + size * 0.36, text, size, colour, "middle")


def hover(timeline: Timeline, names: tuple[str, ...], record: Timed) -> str:
    """Return the text to show when the pointer is over the op of ``record``."""
    op = record.op
    chunk = timeline.plan.chunks[op.chunk]
    lines = [
        f"{op} on stage {record.stage}: {FAMILIES[op.kind].name}",
        f"{timeline.time_text(record.start)} to {timeline.time_text(record.stop)} "
        f"({timeline.time_text(record.seconds)})",
        f"{chunk.tokens} tokens: {names[op.chunk]}",
    ]
    if recomputed_part := timeline.recomputed(record):
        lines.append(f"recomputes in {fraction_text(recomputed_part)} of the layers")
    if recomputed_part := offloaded_fraction(timeline.plan, record.stage, op.chunk):
        lines.append(f"activations of {fraction_text(recomputed_part)} of the layers offloaded")
    if record.peak_bytes:
        lines.append(f"peak {bytes_text(record.peak_bytes)}")
    return "\n".join(lines)


# (colours side by side, vertical offset, thickness, text) of a legend entry.
Entry = tuple[tuple[str, ...], float, float, str]


def _legend(timelines: Sequence[Timeline], width: float, y: float) -> tuple[list[Shape], float]:
    """Return the legend of the colours and marks in use, and the y coordinate of its end."""
    shapes: list[Shape] = []
    x = 14.0
    for marks, down, thick, text in legend(timelines):
        wide = 8.0 * max(2, len(marks))
        if x > 14 and x + wide + 5 + text_width(text, _SMALL) > width:
            x, y = 14.0, y + 18
        dashed = not thick
        for number, colour in enumerate(marks):
            left, part = x + number * wide / len(marks), wide / len(marks)
            if dashed:
                middle = y + down
                line = ((left, middle), (left + part, middle))
                shapes.append(Path(line, colour, 1.2, dashed=True))
            else:
                shapes.append(Rect(left, y + down, part, thick, colour))
        shapes.append(Label(x + wide + 5, y + 9.5, text, _SMALL, colours.INK))
        x += wide + 22 + text_width(text, _SMALL)
    return shapes, y + 16


def legend(timelines: Sequence[Timeline]) -> Iterator[Entry]:
    """Yield the entries of the colours and marks in use."""
    kinds = {r.op.kind for t in timelines for r in (*t.records, *t.transfers)}
    for kind in Kind:
        if kind in kinds:
            yield (FAMILIES[kind].plain,), 0, 11, f"{kind.value} {FAMILIES[kind].name}"
    if any(recomputes(timeline.plan) for timeline in timelines):
        yield (colours.RECOMPUTE,), 0, 11, "recompute: layers' share"
    yield (colours.IDLE,), 0, 11, "idle"
    if any(timeline.critical for timeline in timelines):
        yield (colours.CRITICAL,), 4, _CRITICAL, "critical path"
    paints = palette(timelines[0].plan)
    shown = colours.shades(paints)
    if shown:
        yield shown, 0, 11, colours.SHADES
    if cut := colours.accents(paints):
        yield cut, 4, _ACCENT, colours.ACCENTED
    if any(timeline.budget_bytes and timeline.curves for timeline in timelines):
        yield (colours.BUDGET,), 6, 0, "memory budget"


def _memory(timeline: Timeline, axis: _Axis, y: float) -> tuple[list[Shape], float]:
    """Return the memory curves of all ranks, on one scale, and the y coordinate of their end."""
    height = max(22.0, min(54.0, 360.0 / timeline.ranks))
    budgets = timeline.budget_bytes
    most = max([*timeline.peak_bytes, *budgets, 1.0])
    scale = f"bytes alive on a device: each curve from 0 to {bytes_text(most * 1.04)}"
    shapes: list[Shape] = [Label(14, y + 8, scale, _SMALL, colours.QUIET_INK)]
    y += 14
    for rank, curve in enumerate(timeline.curves):
        bottom = y + height

        def place(point: tuple[float, float], bottom: float = bottom) -> tuple[float, float]:
            return axis.x(point[0]), bottom - height * point[1] / (most * 1.04)

        end = axis.x(timeline.seconds)
        shapes.append(Path(((axis.left, bottom), (end, bottom)), colours.GRID, 1))
        points = list(_steps(list(map(place, curve))))
        outline = ((points[0][0], bottom), *points, (points[-1][0], bottom))
        shapes.append(Path(outline, fill=colours.MEMORY_FILL))
        shapes.append(Path(tuple(points), colours.MEMORY, 1.2))
        peak = timeline.peak_bytes[rank]
        text = bytes_text(peak)
        if budgets:
            _, line = place((0, budgets[rank]))
            shapes.append(Path(((axis.left, line), (end, line)), colours.BUDGET, 1.2, dashed=True))
            text = f"{peak / GIB:.2f} of {bytes_text(budgets[rank])}"
        over = bool(budgets) and peak > budgets[rank]
        shapes += _next_to(
            timeline.plan.rank_name(rank), text, y, height, colours.BUDGET if over else ""
        )
        y = bottom + 6
    return shapes, y


def _steps(points: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the corners of a step curve, which holds each value until the next point."""
    height = None
    for x, y in points:
        if height is not None:
            yield x, height
        yield x, y
        height = y
