"""HTML page that shows a survey of layouts in a browser, without network access."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_epp.show.page import filled
from megatron_epp.show.paint import draw_timelines
from megatron_epp.show.shapes import Drawing, Label, Path, Rect, Shape, text_width
from megatron_epp.show.svg import to_svg
from megatron_epp.show.timeline import Timeline
from megatron_epp.show.units import GIB, seconds_text, ticks, tokens_text

# CSS variables of the page's style.
_INK, _QUIET, _LINE, _HOT = "var(--ink)", "var(--quiet)", "var(--line)", "var(--hot)"
_MARK, _OTHER = "var(--mark)", "var(--other)"
_PART_COLOURS = ("#4e79a7", "#59a14f", "#9c7fc4", "#f0a030", "#d1605e", "#8c8c8c")
_WIDTH, _LEFT, _RIGHT, _SMALL = 1000.0, 70.0, 20.0, 12.0
_COPY = """\
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy);
    try { await navigator.clipboard.writeText(text.textContent); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(text); button.textContent = "Selected: press Ctrl-C"; }
  });
}"""


@dataclass(frozen=True, slots=True)
class GainPoint:
    """Gain of plans: iteration time of Megatron's own schedule / iteration time of the plan.

    Megatron's own schedule packs whole documents.

    Attributes:
        context: maximum number of tokens of a document.
        same: gain in the layout of the chosen row; None if one of the two does not fit in memory.
        best: gain if each of the two runs in its own best layout; None if one of them does not fit.
    """

    context: int
    same: float | None
    best: float | None


@dataclass(frozen=True, slots=True)
class SurveyPage:
    """Contents of the HTML page of a survey of layouts.

    Attributes:
        title: heading.
        verdict: sentences on the best layout.
        error: sentences on the error of predictions.
        headers: headers of the table of layouts.
        rows: cells of the table of layouts.
        chosen: index of the table row that the other sections show.
        flags: for every row, a title and its launch flags, quoted for a shell; the flags are "" if
            Megatron cannot run the row. Empty if Megatron has no flags for the model.
        parts: memory of every rank at its peak, in bytes, by category.
        budgets: memory budget of every rank in bytes.
        packed: timeline of Megatron's own schedule, which packs whole documents, for one batch;
            None if it does not fit in memory.
        planned: timeline of the plan for the same batch; None if the plan does not fit.
        gains: points of the gain curve, by ascending context.
        lengths: tokens of each document, for the histogram.
        context: maximum number of tokens of a document in the survey.
        notes: sentences on what was assumed, left out, or not planned.
    """

    title: str
    verdict: Sequence[str]
    error: Sequence[str]
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: int
    flags: Sequence[tuple[str, str]]
    parts: Sequence[Mapping[str, float]]
    budgets: Sequence[float]
    packed: Timeline | None
    planned: Timeline | None
    gains: Sequence[GainPoint]
    lengths: Sequence[int]
    context: int
    notes: Sequence[str]


def to_page(page: SurveyPage) -> str:
    """Return the HTML text of a survey page."""
    sections = (_table(page), _memory(page), _time(page), _gain(page), _histogram(page))
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in page.notes)
    body = (
        f"<main>\n<h1>{html.escape(page.title)}</h1>\n"
        f'<div class="verdict">{_paragraphs(page.verdict)}</div>\n'
        f'<div class="quiet">{_paragraphs(page.error)}</div>\n'
        + "\n".join(sections)
        + f"\n<h2>Assumed, left out</h2>\n<ul>{notes}</ul>\n</main>"
    )
    return filled("survey", page.title, body, _COPY)


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _cells(cells: Sequence[str], tag: str, numbers: Sequence[bool]) -> str:
    return "".join(
        f"<{tag}{' scope="col"' * (tag == 'th')}{' class="number"' * number}>"
        f"{html.escape(cell)}</{tag}>"
        for cell, number in zip(cells, numbers, strict=True)
    )


def _numbers_table(caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the numbers of a picture as a table, for screen readers."""
    numbers = [False, *(True for _ in headers[1:])]
    body = "".join(f"<tr>{_cells(row, 'td', numbers)}</tr>" for row in rows)
    return (
        f"<details><summary>{html.escape(caption)} in numbers</summary><div class='scroll'><table>"
        f"<thead><tr>{_cells(headers, 'th', numbers)}</tr></thead><tbody>{body}</tbody></table>"
        "</div></details>"
    )


def _table(page: SurveyPage) -> str:
    numbers = [
        all(cell[:1].isdigit() or not cell for cell in column)
        for column in zip(*page.rows, strict=True)
    ]
    lines = []
    for at, row in enumerate(page.rows):
        mark = ' class="chosen"' * (at == page.chosen)
        lines.append(f"<tr{mark}>{_cells(row, 'td', numbers)}</tr>")
        title, flags = page.flags[at] if page.flags else ("", "")
        if flags:
            lines.append(
                f'<tr><td colspan="{len(row)}"><details><summary>{html.escape(title)}</summary>'
                f'<button type="button" data-copy="flags{at}">Copy the flags of row {at + 1}'
                f'</button><pre id="flags{at}">{html.escape(flags)}</pre></details></td></tr>'
            )
    return (
        '<h2>Layouts</h2>\n<div class="scroll" tabindex="0" role="region" aria-label="Layouts">'
        f"<table><thead><tr>{_cells(page.headers, 'th', numbers)}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _figure(title: str, text: str, drawing: Drawing, more: str = "") -> str:
    svg = to_svg(drawing).replace(' xmlns="http://www.w3.org/2000/svg"', "", 1)
    named = html.escape(f"{title}. {text}", quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{named}" ', 1)
    return (
        f"<h2>{html.escape(title)}</h2>\n<p class='quiet'>{html.escape(text)}</p>{more}"
        f'\n<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(title)}">'
        f"{svg}</div>"
    )


def _key(names: Sequence[str], colours: Sequence[str]) -> str:
    items = (
        f'<li><i style="background:{colour}"></i>{html.escape(name)}</li>'
        for name, colour in zip(names, colours, strict=True)
    )
    return f'<ul class="key">{"".join(items)}</ul>'


def _memory(page: SurveyPage) -> str:
    """Return HTML with a drawing of every rank's memory peak by category, and its budget."""
    names = list(page.parts[0])
    most = max(*page.budgets, *(sum(rank.values()) for rank in page.parts)) / GIB * 1.03
    row, y = 22.0, 8.0
    shapes: list[Shape] = []
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    for number, (rank, budget) in enumerate(zip(page.parts, page.budgets, strict=True)):
        shapes.append(Label(_LEFT - 8, y + 15, f"rank {number}", _SMALL, _INK, "end"))
        x = _LEFT
        for (name, held), colour in zip(rank.items(), _PART_COLOURS, strict=True):
            wide = held / GIB * scale
            title = f"rank {number}: {name} {held / GIB:.1f} GiB"
            shapes.append(Rect(x, y, wide, row, colour, title=title))
            x += wide
        line = _LEFT + budget / GIB * scale
        shapes.append(Path(((line, y - 3), (line, y + row + 3)), _HOT, 2.0))
        y += row + 8
    shapes += _axis(most, scale, y, "GiB")
    fullest = max(sum(rank.values()) for rank in page.parts) / GIB
    text = (
        f"Row {page.chosen + 1}, each pipeline rank at its peak, at most {fullest:.1f} GiB; the "
        "red line is its budget."
    )
    rows = [
        [f"rank {number}", *(f"{held / GIB:.1f}" for held in rank.values()), f"{budget / GIB:.1f}"]
        for number, (rank, budget) in enumerate(zip(page.parts, page.budgets, strict=True))
    ]
    drawing = Drawing(_WIDTH, y + 24, tuple(shapes), "none")
    table = _numbers_table("Memory", ["GiB", *names, "budget"], rows)
    return _figure("Memory by part", text, drawing, _key(names, _PART_COLOURS)) + table


def _axis(stop: float, scale: float, y: float, unit: str) -> list[Shape]:
    shapes: list[Shape] = [Path(((_LEFT, y), (_LEFT + stop * scale, y)), _LINE)]
    for at in ticks(stop, 8):
        text = f"{at:g} {unit}" if not at else f"{at:g}"
        shapes.append(Label(_LEFT + at * scale, y + 15, text, _SMALL, _QUIET, "middle"))
    return shapes


def _time(page: SurveyPage) -> str:
    runs = {"packed": page.packed, "planned": page.planned}
    there = [run for run in runs.values() if run is not None]
    text = f"Row {page.chosen + 1}, one batch on the ranks of one replica: " + "; ".join(
        f"{name} does not fit" if run is None else f"{name} takes {seconds_text(run.seconds)}"
        for name, run in runs.items()
    )
    if not there:
        return f"<h2>Time line</h2><p>{html.escape(text)}</p>"
    return _figure("Time line", f"{text}.", draw_timelines(*there, width=1400))


def _gain(page: SurveyPage) -> str:
    """Return HTML with curves of the gains ``same`` and ``best`` (GainPoint) over the context."""
    values = [each for point in page.gains for each in (point.same, point.best) if each]
    top, high, low = max([1.2, *values]) * 1.05, 20.0, 240.0
    step = (_WIDTH - _LEFT - _RIGHT - 60) / max(1, len(page.gains) - 1)

    def place(at: int, value: float) -> tuple[float, float]:
        return _LEFT + 30 + at * step, low - (low - high) * value / top

    shapes: list[Shape] = []
    for value in ticks(top, 6):
        y = place(0, value)[1]
        shapes.append(Path(((_LEFT, y), (_WIDTH - _RIGHT, y)), _INK if value == 1 else _LINE))
        shapes.append(Label(_LEFT - 8, y + 4, f"{value:g}", _SMALL, _QUIET, "end"))
    for at, point in enumerate(page.gains):
        x = place(at, 0)[0]
        shapes.append(Label(x, low + 16, tokens_text(point.context), _SMALL, _QUIET, "middle"))
    for name, colour in (("same", _MARK), ("best", _OTHER)):
        points = [(at, getattr(point, name)) for at, point in enumerate(page.gains)]
        line = tuple(place(at, value) for at, value in points if value)
        shapes.append(Path(line, colour, 2.5, dashed=name == "best"))
        shapes += [Rect(x - 4, y - 4, 8, 8, colour) for x, y in line]
    names = ("in the same layout", "each at its best layout (dashed)")
    rows = [
        [tokens_text(p.context), *(f"{g:.2f}" if g else "does not fit" for g in (p.same, p.best))]
        for p in page.gains
    ]
    text = (
        "Seconds of Megatron's own schedule with packed documents, the fastest of its baselines, "
        "over seconds of the plan: documents of one batch, cut to each context, first plans "
        "without a search. No mark: packed documents do not fit."
    )
    drawing = Drawing(_WIDTH, low + 28, tuple(shapes), "none")
    figure = _figure("Gain by context", text, drawing, _key(names, (_MARK, _OTHER)))
    return figure + _numbers_table("Gain", ["context", *names], rows)


def _histogram(page: SurveyPage) -> str:
    """Return HTML with a histogram of document lengths, in bins of powers of two."""
    counts: dict[int, int] = {}
    for length in page.lengths:
        power = int(math.log2(length))
        counts[power] = counts.get(power, 0) + 1
    powers = range(min(counts), max(counts) + 1)
    wide, high, low = (_WIDTH - _LEFT - _RIGHT) / len(powers), 20.0, 200.0
    shapes: list[Shape] = [Path(((_LEFT, low), (_WIDTH - _RIGHT, low)), _LINE)]
    for at, power in enumerate(powers):
        fraction = counts.get(power, 0) / max(counts.values())
        x, tall = _LEFT + at * wide, (low - high) * fraction
        title = f"{2**power} to {2 ** (power + 1) - 1} tokens: {counts.get(power, 0)} documents"
        shapes.append(Rect(x + 2, low - tall, wide - 4, tall, _MARK, title=title))
        name = tokens_text(2**power)
        if text_width(name, _SMALL) < wide:
            shapes.append(Label(x + wide / 2, low + 15, name, _SMALL, _QUIET, "middle"))
    every = sum(page.lengths)
    long = sum(each for each in page.lengths if 2 * each > page.context) / every
    text = (
        f"{len(page.lengths)} documents, {tokens_text(every)} tokens; {long:.0%} of the tokens lie "
        f"in documents of more than half the context of {tokens_text(page.context)}."
    )
    rows = [[tokens_text(2**power), str(counts.get(power, 0))] for power in powers]
    table = _numbers_table("Lengths", ["tokens, from", "documents"], rows)
    return _figure("Lengths", text, Drawing(_WIDTH, low + 26, tuple(shapes), "none")) + table
