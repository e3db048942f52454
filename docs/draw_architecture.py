#!/usr/bin/env python3
"""Draws the rooms of the package and who imports whom, from the imports themselves.

    python docs/draw_architecture.py [FILE.svg]        default: docs/architecture.svg

A room stands above all that it imports; a line that follows from two others is left out. A test
makes the picture again and compares.
"""

import ast
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_epp.show.shapes import Drawing, Label, Rect, Shape
from megatron_epp.show.shapes import Path as Line
from megatron_epp.show.svg import to_svg

FILE = Path(__file__).with_name("architecture.svg")
PACKAGE = Path(__file__).resolve().parents[1] / "megatron_epp"
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, LEGEND = 1240.0, 128.0, 280.0, 88.0, 40.0
COLUMNS = {"thinking": (0.0, 620.0), "both": (620.0, 930.0), "doing": (930.0, WIDTH)}
INK, QUIET, LINE = "#1f2937", "#4b5563", "#9ca3af"
# What a room may know of the world outside: the most of these that it imports. Left to right.
COLOURS = {
    "": ("#dbeafe", "numpy and the standard library"),
    "torch": ("#dcfce7", "and torch"),
    "megatron": ("#fde68a", "and Megatron"),
}


def imported(path: Path) -> set[str]:
    """Names of the modules that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def house() -> tuple[dict[str, set[str]], dict[str, str]]:
    """(the rooms that each room imports, what each may know of the world outside)."""
    rooms = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    below, knows = {}, {}
    for room in rooms:
        names = set().union(*(imported(path) for path in (PACKAGE / room).rglob("*.py")))
        inner = {name.split(".")[1] for name in names if name.startswith("megatron_epp.")}
        below[room] = (inner & set(rooms)) - {room}
        outer = {name.split(".")[0] for name in names}
        knows[room] = max((one for one in COLOURS if one in outer | {""}), key=list(COLOURS).index)
    return below, knows


def picture() -> str:
    """The SVG."""
    below, knows = house()

    def reach(room: str) -> set[str]:
        return below[room].union(*map(reach, below[room]))

    def floor(room: str) -> int:
        return max((floor(other) + 1 for other in below[room]), default=0)

    thinking = {room for room in below if not knows[room] and room != "ir"}

    def column(room: str) -> str:
        if room in thinking:
            return "thinking"
        return "both" if room == "ir" or reach(room) & thinking else "doing"

    floors = max(map(floor, below)) + 1
    places: dict[str, tuple[float, float]] = {}
    boxes: list[Shape] = []
    for at, (left, right) in COLUMNS.items():
        for level in range(floors):
            row = [room for room in below if column(room) == at and floor(room) == level]
            for number, room in enumerate(row):
                x = left + (right - left) * (2 * number + 1) / (2 * len(row))
                y = LEGEND + (floors - 1 - level) * ROW
                places[room] = x, y
                x -= BOX_WIDTH / 2
                boxes.append(Rect(x, y, BOX_WIDTH, BOX_HEIGHT, COLOURS[knows[room]][0], QUIET, 1))
                boxes.append(Label(x + 12, y + 21, f"{room}/", 15, INK, bold=True))
                for line, text in enumerate(textwrap.wrap(idea(room), 39)):
                    boxes.append(Label(x + 12, y + 42 + 16 * line, text, 11.5, QUIET))
    lines: list[Shape] = []
    for room, others in below.items():
        for other in sorted(others - set().union(*(reach(one) for one in others))):
            (x, y), (to_x, to_y) = places[room], places[other]
            lines.append(Line(((x, y + BOX_HEIGHT), (to_x, to_y)), LINE, 1.5))
    x = 14.0
    for colour, text in COLOURS.values():
        boxes.append(Rect(x, 8, 16, 12, colour, QUIET, 1))
        boxes.append(Label(x + 22, 18, text, 11.5, QUIET))
        x += 240
    boxes.append(Label(x, 18, "every line: the upper room imports the lower", 11.5, QUIET))
    return to_svg(Drawing(WIDTH, LEGEND + floors * ROW - 30, (*lines, *boxes)))


def idea(room: str) -> str:
    """The first line of the room's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    return text.splitlines()[0].replace("``", "")


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    file.write_text(picture())
    print(f"wrote {file}")
