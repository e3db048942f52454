"""Writes or compares the golden plans of ``tests/golden``: 50 batches through the command line.

    python tests/planner/golden_plans.py           # names the plans that changed, exit status 1
    python tests/planner/golden_plans.py --write   # rewrites them, to be reviewed as a diff

A plan is a pure function of lengths, flags and cost model, so its text may change only where
somebody meant to change what the planner does.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"


def cases() -> Iterator[tuple[Path, list[str]]]:
    """The file of every golden plan, and the command line that makes it.

    A line of golden_plans.txt has the lengths, the number of the batch, and options.
    """
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    for number, line in enumerate(lines):
        lengths, batch, *options = line.split()
        placed = "-placed" if "--placement" in options else ""
        if not placed:
            options += ["--placement", "even"]
        yield (
            FOLDER / f"{number:02}-{lengths}{placed}.plan",
            ["plan", "--lengths", lengths, "--batch", batch, *options],
        )


def make(arguments: list[str]) -> str:
    """The text that the command line prints; ``ValueError`` where it refuses."""
    from megatron_epp.__main__ import main

    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        status = main(arguments)
    if status:
        raise ValueError(f"{' '.join(arguments)}: exit status {status}: {told.getvalue()}")
    return printed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the golden files")
    write = parser.parse_args().write
    changed = []
    every = list(cases())
    for path, arguments in every:
        text = make(arguments)
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            changed.append(path.name)
            print(f"{path.name}: changed: {' '.join(arguments)}")
    print(f"{len(every)} plans, {len(changed)} changed" if not write else "written")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
