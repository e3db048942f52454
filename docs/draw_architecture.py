#!/usr/bin/env python3
"""Draws the packages and who imports whom, from the imports themselves.

    python docs/draw_architecture.py [FILE.svg]        default: docs/architecture.svg

A package stands above all that it imports; a line that follows from two others is left out. A test
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
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, LEGEND = 1560.0, 128.0, 280.0, 88.0, 40.0
COLUMNS = {"thinking": (0.0, 620.0), "both": (620.0, 1240.0), "doing": (1240.0, WIDTH)}
INK, QUIET, LINE = "#1f2937", "#4b5563", "#9ca3af"
# What a package may import of the world outside: the most of these that it imports. Left to right.
COLOURS = {
    "": ("#dbeafe", "numpy and the standard library"),
    "torch": ("#dcfce7", "and torch"),
    "megatron": ("#fde68a", "and Megatron"),
}

# Earlier import paths of slices.py, in mcore/loops/adapters/.
ADAPTERS = {"nemo_samples", "slime_samples", "swift_packs", "verl_samples"}
IDEAS = {
    "frameworks/*/slices": "A framework's adapter for slices of its micro-batches.",
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


def package_of(module: str) -> str:
    """Return the box of ``module``, a dotted name below megatron_epp.

    What a framework's folder says of its micro-batches and of slices is imported from two heights.
    """
    first, *others = module.split(".")
    if (first == "frameworks" and "slices" in others) or ADAPTERS & set(others):
        return "frameworks/*/slices"
    return first


def packages() -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return the packages that each one imports, and what each may import of the outside."""
    names: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.glob("*/**/*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        names.setdefault(package_of(module), set()).update(imported(path))
    below, knows = {}, {}
    for package, modules in names.items():
        inner = {
            package_of(module.removeprefix("megatron_epp."))
            for module in modules
            if module.startswith("megatron_epp.")
        }
        below[package] = (inner & set(names)) - {package}
        outer = {module.split(".")[0] for module in modules}
        knows[package] = max(
            (one for one in COLOURS if one in outer | {""}), key=list(COLOURS).index
        )
    return below, knows


def picture() -> str:
    """The SVG."""
    below, knows = packages()

    def reach(package: str) -> set[str]:
        return below[package].union(*map(reach, below[package]))

    def floor(package: str) -> int:
        return max((floor(other) + 1 for other in below[package]), default=0)

    thinking = {package for package in below if not knows[package] and package != "ir"}

    def column(package: str) -> str:
        if package in thinking:
            return "thinking"
        return "both" if package == "ir" or reach(package) & thinking else "doing"

    floors = max(map(floor, below)) + 1
    places: dict[str, tuple[float, float]] = {}
    boxes: list[Shape] = []
    for at, (left, right) in COLUMNS.items():
        for level in range(floors):
            row = [
                package for package in below if column(package) == at and floor(package) == level
            ]
            for number, package in enumerate(row):
                x = left + (right - left) * (2 * number + 1) / (2 * len(row))
                y = LEGEND + (floors - 1 - level) * ROW
                places[package] = x, y
                x -= BOX_WIDTH / 2
                boxes.append(
                    Rect(x, y, BOX_WIDTH, BOX_HEIGHT, COLOURS[knows[package]][0], QUIET, 1)
                )
                boxes.append(Label(x + 12, y + 21, f"{package}/", 15, INK, bold=True))
                for line, text in enumerate(textwrap.wrap(idea(package), 39)):
                    boxes.append(Label(x + 12, y + 42 + 16 * line, text, 11.5, QUIET))
    lines: list[Shape] = []
    for package, others in below.items():
        for other in sorted(others - set().union(*(reach(one) for one in others))):
            (x, y), (to_x, to_y) = places[package], places[other]
            lines.append(Line(((x, y + BOX_HEIGHT), (to_x, to_y)), LINE, 1.5))
    x = 14.0
    for colour, text in COLOURS.values():
        boxes.append(Rect(x, 8, 16, 12, colour, QUIET, 1))
        boxes.append(Label(x + 22, 18, text, 11.5, QUIET))
        x += 240
    boxes.append(Label(x, 18, "every line: the upper package imports the lower", 11.5, QUIET))
    return to_svg(Drawing(WIDTH, LEGEND + floors * ROW - 30, (*lines, *boxes)))


def idea(package: str) -> str:
    """Return the first line of the package's docstring."""
    if package in IDEAS:
        return IDEAS[package]
    text = ast.get_docstring(ast.parse((PACKAGE / package / "__init__.py").read_text())) or ""
    return text.splitlines()[0].replace("``", "")


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    file.write_text(picture())
    print(f"wrote {file}")
