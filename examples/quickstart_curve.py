"""Draws curves over iterations: the losses of one or several runs, for the quickstart's report.

As shapes, like the time lines, so that one canvas writes both; matplotlib would only do for PNG.
"""

import math
from collections.abc import Sequence

from megatron_epp.show import colours
from megatron_epp.show.shapes import Drawing, Label, Path, Rect, Shape, text_width
from megatron_epp.show.units import ticks

_COLOURS = ("#2f6fd6", "#d9822b", "#2a9d63", "#8e44ad", "#c0392b", "#546e7a")
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 24.0, 62.0, 46.0


def draw_curves(
    series: Sequence[tuple[str, Sequence[float]]],
    title: str = "",
    *,
    x_name: str = "iteration",
    y_name: str = "loss",
    first: int = 1,
    width: float = 860.0,
    height: float = 440.0,
) -> Drawing:
    """(name, values) series over iterations ``first``, ``first`` + 1, ...; one axis for all.

    A value that is no finite number leaves a gap. Later series are dashed, so that one that lies
    under another can be seen.
    """
    finite = [v for _, values in series for v in values if math.isfinite(v)]
    if not finite:
        raise ValueError("no finite value to draw; expected at least one (name, values) series")
    low, high = _limits(min(finite), max(finite))
    last = first + max(len(values) for _, values in series) - 1
    right, bottom = width - _RIGHT, height - _BOTTOM

    def place(iteration: float, value: float) -> tuple[float, float]:
        x = _LEFT + (right - _LEFT) * (iteration - first) / max(1, last - first)
        return x, bottom - (bottom - _TOP) * (value - low) / (high - low)

    shapes: list[Shape] = [Label(14, 24, title, 16, colours.INK, bold=True)]
    x = _LEFT
    for number, (name, _) in enumerate(series):
        shapes.append(Rect(x, 40, 18, 4, _COLOURS[number % len(_COLOURS)]))
        shapes.append(Label(x + 23, 46, name, 11.5, colours.INK))
        x += 44 + text_width(name, 11.5)
    for tick in ticks(high - low, 6):
        y = place(first, low + tick)[1]
        shapes.append(Path(((_LEFT, y), (right, y)), colours.GRID, 1))
        shapes.append(Label(_LEFT - 8, y + 4, f"{low + tick:.4g}", 11, colours.QUIET_INK, "end"))
    for tick in ticks(last, 8):
        if tick < first or tick % 1:
            continue
        x = place(tick, low)[0]
        shapes.append(Label(x, bottom + 17, f"{int(tick)}", 11, colours.QUIET_INK, "middle"))
    middle = (_LEFT + right) / 2
    shapes.append(Label(middle, height - 10, x_name, 11.5, colours.QUIET_INK, "middle"))
    shapes.append(Label(14, _TOP - 6, y_name, 11.5, colours.QUIET_INK))
    for number, (_, values) in enumerate(series):
        run: list[tuple[float, float]] = []
        for iteration, value in enumerate([*values, math.nan], first):
            if math.isfinite(value):
                run.append(place(iteration, value))
                continue
            if len(run) == 1:
                run.append((run[0][0] + 1, run[0][1]))
            if run:
                colour = _COLOURS[number % len(_COLOURS)]
                shapes.append(Path(tuple(run), colour, 1.8, dashed=number > 0))
            run = []
    return Drawing(width, height, tuple(shapes))


def _limits(low: float, high: float) -> tuple[float, float]:
    """Round limits of an axis around [low, high]."""
    spread = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(spread / 4))
    step = next(n * power for n in (1, 2, 5, 10) if n * power * 5 >= spread)
    return math.floor(low / step) * step, (math.floor(high / step) + 1) * step
