#!/usr/bin/env python3
"""Files of a layer kind: the files that only this kind uses, and its lines in other files.

scripts/kind_files.py NAME     counts them: what adding such a kind takes
"""

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_epp"


@dataclass
class KindFiles:
    """Files and lines of a layer kind in a package.

    files   text of the files that only this kind uses, by name in the package
    lines   (line number from 0, text) of its lines in other files, by file name
    """

    files: dict[str, str] = field(default_factory=dict)
    lines: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


def own_files(kind: str, package: Path) -> list[Path]:
    """Return the files that only ``kind`` uses."""
    folders = [package / "cost" / "kinds", package / "layers", package / "mcore" / "kinds"]
    modules = [path for folder in folders if (path := folder / f"{kind}.py").exists()]
    return modules + [path for folder in folders for path in sorted((folder / kind).glob("*.py"))]


def lines_of(source: str, modules: set[str]) -> list[int]:
    """Return the numbers of the lines of ``source`` that import from ``modules``.

    The result includes lines that use an imported name.
    """
    found: set[int] = set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            found |= {*range(node.lineno - 1, node.end_lineno or node.lineno)}
            names |= {name.asname or name.name for name in node.names}
    if names:
        used = re.compile(rf"\b({'|'.join(sorted(names))})\b")
        found |= {n for n, line in enumerate(source.splitlines()) if used.search(line)}
    return sorted(found)


def kind_files(kind: str, package: Path = PACKAGE) -> KindFiles:
    """Return the files of ``kind`` in ``package``, and its lines in other files."""
    own, made = own_files(kind, package), KindFiles()
    made.files = {str(path.relative_to(package)): path.read_text() for path in own}
    names = (Path(name).with_suffix("").parts for name in made.files)
    modules = {".".join((package.name, *parts)).removesuffix(".__init__") for parts in names}
    for path in sorted(package.rglob("*.py")):
        if path in own:
            continue
        source = path.read_text()
        if numbers := lines_of(source, modules):
            lines = source.splitlines(keepends=True)
            made.lines[str(path.relative_to(package))] = [(n, lines[n]) for n in numbers]
    return made


def take_out(kind: str, package: Path) -> KindFiles:
    """Remove ``kind`` from ``package``, a copy; return the removed files and lines."""
    taken = kind_files(kind, package)
    for name in taken.files:
        (package / name).unlink()
    for name, gone in taken.lines.items():
        numbers = {number for number, _ in gone}
        lines = enumerate((package / name).read_text().splitlines(keepends=True))
        (package / name).write_text("".join(line for n, line in lines if n not in numbers))
    return taken


def put_back(taken: KindFiles, package: Path) -> None:
    """Insert removed files and lines into ``package`` again."""
    for name, text in taken.files.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
    for name, gone in taken.lines.items():
        lines = (package / name).read_text().splitlines(keepends=True)
        for number, line in gone:
            lines.insert(number, line)
        (package / name).write_text("".join(lines))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = kind_files(sys.argv[1])
    for name, text in found.files.items():
        print(f"new      {name}: {len(text.splitlines())} lines")
    for name, lines in found.lines.items():
        print(f"changed  {name}: {len(lines)} lines")
    print(f"{len(found.files)} new files, {len(found.lines)} changed ones")


if __name__ == "__main__":
    main()
