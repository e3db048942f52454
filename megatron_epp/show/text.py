"""Gantt chart in characters: ranks as rows, time as columns.

An op is drawn as its label, followed by copies of the sign of its kind (colours.FAMILIES).
"""

import shutil

from megatron_epp.ir import Kind, Timed
from megatron_epp.ir.op import TRANSFERS
from megatron_epp.show.colours import FAMILIES
from megatron_epp.show.timeline import (
    Timeline,
    by_rank,
    offloaded_text,
    recomputes,
)
from megatron_epp.show.units import fraction_text

_IDLE = "."
_MOST_BLOCKS = 12
_LABELLED_FRACTION = 0.9


def text_gantt(timeline: Timeline, width: int | None = None, colour: bool = False) -> str:
    """Return a Gantt chart as text.

    If labels do not fit, the time axis is split into several blocks, one below the other. An op
    that is still too short for its label shows the letter of its kind, alternately in upper and
    lower case: ``FfF`` is three ops. Ops shorter than a column may be left out, and are counted.

    Args:
        timeline: run to draw.
        width: maximum number of columns; default: the width of the terminal, at least 80.
        colour: whether to add ANSI colours.

    Raises:
        ValueError: ``width`` is below 40.
    """
    if width is None:
        width = max(80, shutil.get_terminal_size((120, 24)).columns)
    if width < 40:
        raise ValueError(f"width {width}: expected at least 40 columns")
    names = [f"{timeline.plan.rank_name(rank)} " for rank in range(timeline.ranks)]
    margin = max(map(len, names)) + 1
    headroom = width - margin - 1
    columns = _columns(timeline, headroom)
    lines = [f"{timeline.title}: " if timeline.title else ""]
    lines[0] += (
        f"{timeline.summary}, {timeline.time_text(timeline.seconds)}, bubbles "
        f"{fraction_text(timeline.bubble_ratio)}{offloaded_text(timeline.plan)}"
    )
    rows = [
        _row(timeline, records, transfers, columns)
        for records, transfers in zip(
            by_rank(timeline.records, timeline.plan),
            by_rank(timeline.transfers, timeline.plan),
            strict=True,
        )
    ]
    axis = _axis(timeline, columns)
    lost = sum(row.lost for row in rows)
    for start in range(0, columns, headroom):
        stop = min(start + headroom, columns)
        lines.append(" " * margin + axis[start:stop].rstrip())
        for name, row in zip(names, rows, strict=True):
            cells = row.cells[start:stop]
            painted = _painted(cells) if colour else "".join(char for char, _ in cells)
            lines.append(f"{name:<{margin - 1}}|{painted}|")
    lines += _legend(timeline, rows)
    if lost:
        lines.append(f"{lost} ops are too short for this width; draw -o x.html shows all of them")
    idle = [
        f"{rank}: {fraction_text(1 - busy / timeline.seconds)}"
        for rank, busy in enumerate(timeline.busy)
        if timeline.seconds
    ]
    lines.append(f"idle  {'  '.join(idle)}")
    return "\n".join(lines) + "\n"


class _Row:
    """Characters of one rank's row, each with the op kind, or with None if the rank is idle."""

    def __init__(self, columns: int):
        self.cells: list[tuple[str, Kind | None]] = [(_IDLE, None)] * columns
        self.lost = 0  # ops of less than half a column
        self.unlabelled = 0  # ops that are shown by letters alone


def _columns(timeline: Timeline, headroom: int) -> int:
    """Return the number of columns of the time axis: a multiple of ``headroom``, a block's width.

    The axis has space for 90% of the labels, but at most 12 blocks one below the other.
    """
    if not timeline.seconds:
        return headroom
    needs = sorted(
        (len(_label(timeline, record)) + 1) * timeline.seconds / record.seconds
        for record in timeline.records
        if record.seconds > 0
    )
    needed = needs[int(_LABELLED_FRACTION * (len(needs) - 1))] if needs else headroom
    blocks = -(-needed // headroom)
    return int(min(max(1, blocks), _MOST_BLOCKS)) * headroom


def _row(timeline: Timeline, records: list[Timed], transfers: list[Timed], columns: int) -> _Row:
    row = _Row(columns)
    scale = columns / timeline.seconds if timeline.seconds else 0.0
    for number, record in enumerate(records):
        # Both ends are rounded alike, so that adjacent ops stay adjacent.
        start, stop = round(record.start * scale), round(record.stop * scale)
        if stop <= start:
            row.lost += 1
            continue
        label = _label(timeline, record)
        if len(label) <= stop - start:
            text = label + FAMILIES[record.op.kind].sign * (stop - start - len(label))
        else:
            row.unlabelled += 1
            symbol = record.op.kind.value
            text = (symbol if number % 2 == 0 else symbol.lower()) * (stop - start)
        row.cells[start:stop] = [(char, record.op.kind) for char in text]
    # Waits for messages are drawn in idle columns only, as ops of the rank may run meanwhile.
    for record in transfers:
        for column in range(round(record.start * scale), round(record.stop * scale)):
            if column < columns and row.cells[column][1] is None:
                row.cells[column] = (FAMILIES[record.op.kind].sign, record.op.kind)
    return row


def _legend(timeline: Timeline, rows: list[_Row]) -> list[str]:
    """Return the legend of the letters and signs in the chart."""
    kinds = {record.op.kind for record in (*timeline.records, *timeline.transfers)}
    words = [
        f"{family.sign if kind in TRANSFERS else kind.value} {family.name}"
        for kind, family in FAMILIES.items()
        if kind in kinds
    ]
    if recomputes(timeline.plan):
        words.append("* recomputes")
    lines = ["  ".join([*words, ". idle"])]
    if any(row.unlabelled for row in rows):
        lines.append(
            "letters without a number, large and small in turn: ops too short for their label "
            "(FfF: three)"
        )
    return lines


def _label(timeline: Timeline, record: Timed) -> str:
    return f"{timeline.name(record)}{'*' * (timeline.recomputed(record) > 0)}"


def _axis(timeline: Timeline, columns: int) -> str:
    line = [" "] * (columns + 16)
    for place, label in timeline.ticks(max(1, columns // 14)):
        at = round(place / timeline.seconds * columns) if timeline.seconds else 0
        text = f"|{label}"
        line[at : at + len(text)] = text
    return "".join(line)[:columns]


def _painted(cells: list[tuple[str, Kind | None]]) -> str:
    parts, kind = [], None
    for char, own in cells:
        if own is not kind:
            parts.append("\x1b[0m" if own is None else f"\x1b[0;{FAMILIES[own].ansi}m")
            kind = own
        parts.append(char)
    return "".join(parts) + ("\x1b[0m" if kind is not None else "")
