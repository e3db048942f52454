"""Tables as plain text with aligned columns, or as markdown."""

from collections.abc import Sequence

COLUMNS = 100  # most columns of a line that a command prints


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table with two blanks between columns, and with numbers right-aligned."""
    widths = _widths(headers, rows)
    right = [_numeric([row[column] for row in rows]) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(map(_aligned, cells, widths, right)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *map(line, rows)]) + "\n"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as markdown."""
    widths = _widths(headers, rows)
    right = [_numeric([row[column] for row in rows]) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_aligned, cells, widths, right))} |"

    marks = [
        "-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)
    ]
    return "\n".join([line(headers), f"| {' | '.join(marks)} |", *map(line, rows)]) + "\n"


def _widths(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells; expected {len(headers)}")
    return [max(map(len, column)) for column in zip(headers, *rows, strict=True)]


def _aligned(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _numeric(cells: Sequence[str]) -> bool:
    """Return whether every cell is empty or starts like a number."""
    return bool(cells) and all(cell[:1].isdigit() or cell[:1] in ("-", "+", "") for cell in cells)
