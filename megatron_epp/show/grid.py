"""Picture of a grid of nodes: the ranks of each node, spare nodes and failed nodes."""

import colorsys
from collections.abc import Iterable, Mapping

from megatron_epp.show.colours import GRID, IDLE, INK, PAPER, QUIET_INK, RECOMPUTE
from megatron_epp.show.shapes import Drawing, Label, Path, Rect, Shape

Place = tuple[int, int]  # row, column
_FAILED, _SPARE = "x", "."
_TEXT, _CELL, _GAP, _MARGIN = 11.0, 30.0, 4.0, 36.0


def grid_text(
    rows: int, columns: int, cells: Mapping[Place, tuple[int, str]], failed: Iterable[Place]
) -> str:
    """Return the grid as text.

    Args:
        rows: number of rows.
        columns: number of columns.
        cells: (group, label) of every node that has ranks; the text shows the label.
        failed: (row, column) of failed nodes. All nodes that are not in ``cells`` or ``failed`` are
            spare.
    """
    failed = set(failed)
    known = {place: label for place, (_, label) in cells.items()}
    known |= dict.fromkeys(failed, _FAILED)
    labels = [
        [known.get((row, column), _SPARE) for column in range(columns)] for row in range(rows)
    ]
    width = max(len(str(columns - 1)), *(len(label) for row in labels for label in row))
    number = len(str(rows - 1))
    lines = [" " * number, *(f"{row:>{number}}" for row in range(rows))]
    for column in range(columns):
        lines[0] += f" {column:>{width}}"
    for row, labelled in enumerate(labels):
        lines[row + 1] += "".join(f" {label:>{width}}" for label in labelled)
    legend = f"stage.replica of each node by row and column; {_FAILED} failed, {_SPARE} spare"
    return "\n".join((*lines, legend)) + "\n"


def grid_drawing(
    rows: int,
    columns: int,
    cells: Mapping[Place, tuple[int, str]],
    failed: Iterable[Place],
    names: Mapping[Place, str],
    title: str,
) -> Drawing:
    """Return the grid as a drawing: one colour per group, failed nodes crossed out.

    Args:
        rows: number of rows.
        columns: number of columns.
        cells: (group, label) of every node that has ranks; the group determines the colour.
        failed: (row, column) of failed nodes. All nodes that are not in ``cells`` or ``failed`` are
            spare.
        names: name of every node, shown when the pointer is over the node.
        title: heading of one line.
    """
    longest = max((len(label) for _, label in cells.values()), default=1)
    wide = max(_CELL, longest * _TEXT * 0.6 + 8)
    groups = 1 + max((group for group, _ in cells.values()), default=0)
    shapes: list[Shape] = [Label(_MARGIN, 20, title, 13, INK, bold=True)]
    failed = set(failed)

    def corner(place: Place) -> tuple[float, float]:
        return _MARGIN + place[1] * (wide + _GAP), _MARGIN + 14 + place[0] * (_CELL + _GAP)

    for column in range(columns):
        x, y = corner((0, column))
        shapes.append(Label(x + wide / 2, y - 5, str(column), 10, QUIET_INK, "middle"))
    for row in range(rows):
        x, y = corner((row, 0))
        shapes.append(Label(x - 6, y + _CELL / 2 + 4, str(row), 10, QUIET_INK, "end"))
        for place in ((row, column) for column in range(columns)):
            x, y = corner(place)
            group, label = cells.get(place, (-1, ""))
            fill = PAPER if place in failed else IDLE if group < 0 else group_colour(group, groups)
            shapes.append(Rect(x, y, wide, _CELL, fill, GRID, 1.0, names.get(place, "")))
            if place in failed:
                right, low = x + wide, y + _CELL
                shapes.append(Path(((x, y), (right, low)), RECOMPUTE, 1.5))
                shapes.append(Path(((x, low), (right, y)), RECOMPUTE, 1.5))
            elif label:
                at = x + wide / 2, y + _CELL / 2 + 4
                shapes.append(Label(*at, label, _TEXT, INK, "middle"))
    low = corner((rows, 0))[1] + 16
    legend = "stage.replica of each node, one colour a stage; grey: spare; crossed out: failed"
    shapes.append(Label(_MARGIN, low, legend, 11, QUIET_INK))
    width = max(corner((0, columns))[0], _MARGIN + len(legend) * 6.6, _MARGIN + len(title) * 8)
    return Drawing(width + 12, low + 14, tuple(shapes))


def group_colour(group: int, groups: int) -> str:
    """Return a light colour for group number ``group``; adjacent groups have different hues."""
    hue = group / groups if groups < 4 else group * 0.381966 % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.74, 0.62)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
