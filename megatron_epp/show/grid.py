"""Picture of a grid of nodes: the ranks of each node, spare nodes and failed nodes."""

from collections.abc import Iterable, Mapping

Place = tuple[int, int]  # row, column


def grid_text(rows: int, columns: int, labels: Mapping[Place, str], failed: Iterable[Place]) -> str:
    """Return the grid as text.

    Args:
        rows: number of rows.
        columns: number of columns.
        labels: label of every node that has ranks, by (row, column).
        failed: (row, column) of failed nodes. All nodes that are not in ``labels`` or ``failed``
            are spare.
    """
    known = {**labels, **dict.fromkeys(failed, "x")}
    lines = [["", *map(str, range(columns))]]
    for row in range(rows):
        lines.append([str(row), *(known.get((row, column), ".") for column in range(columns))])
    number, width = len(str(rows - 1)), max(len(cell) for _, *cells in lines for cell in cells)
    text = "\n".join(
        f"{first:>{number}}" + "".join(f" {cell:>{width}}" for cell in cells)
        for first, *cells in lines
    )
    return f"{text}\nstage.replica of each node by row and column; x failed, . spare\n"
