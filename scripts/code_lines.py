#!/usr/bin/env python3
"""Count lines of Python by folder: code, docstrings, comments, blank lines.

python scripts/code_lines.py                    # all files of the checkout
python scripts/code_lines.py megatron_epp/ir    # some folders or files
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("code", "doc", "comment", "blank")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count(text: str) -> Counter[str]:
    """Lines of a module by kind; blank lines of a docstring are blank."""
    lines = text.splitlines()
    inside = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    kinds: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            kinds["blank"] += 1
        elif number in inside:
            kinds["doc"] += 1
        else:
            kinds["comment" if line.lstrip().startswith("#") else "code"] += 1
    return kinds


def main(wanted: list[str]) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    totals: dict[str, Counter[str]] = {}
    for name in listed:
        path = ROOT / name
        if not path.exists() or (
            wanted and not any(f"{name}/".startswith(f"{each.rstrip('/')}/") for each in wanted)
        ):
            continue
        top, *below = name.split("/")
        folders = {top if below else "."}
        if top == "megatron_epp":
            folders.add("/".join([top, below[0]]))
        for folder in folders:
            kinds = totals.setdefault(folder, Counter())
            kinds += count(path.read_text())
            kinds["files"] += 1
    columns = (*KINDS, "files")
    print(f"{'folder':36}" + "".join(f"{column:>9}" for column in columns))
    for folder, kinds in sorted(totals.items(), key=lambda item: -item[1]["code"]):
        print(f"{folder:36}" + "".join(f"{kinds[column]:9}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:])
