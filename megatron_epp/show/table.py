"""Tables as plain text with aligned columns."""

from collections.abc import Sequence

COLUMNS = 100  # most columns of a line that a command prints


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table with two blanks between columns, and with numbers right-aligned."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells; expected {len(headers)}")
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    right = [numeric([row[column] for row in rows]) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(map(aligned, cells, widths, right)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(headers), rule, *map(line, rows)]) + "\n"


def aligned(cell: str, width: int, right: bool) -> str:
    """Return ``cell`` filled with blanks to ``width``, at its end or, if ``right``, before it."""
    return cell.rjust(width) if right else cell.ljust(width)


def numeric(cells: Sequence[str]) -> bool:
    """Return whether every cell is empty or starts like a number."""
    return bool(cells) and all(cell[:1].isdigit() or cell[:1] in ("-", "+", "") for cell in cells)
