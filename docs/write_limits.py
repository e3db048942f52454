#!/usr/bin/env python3
"""Writes the table of what does not run into docs/reference/support.md from the capabilities table.

    python docs/write_limits.py

A test makes the page again and compares.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_epp.mcore.capabilities.table import TABLE

FILE = Path(__file__).parent / "reference" / "support.md"
UNTYPED = "`--epp` in scripts"
BEGIN, END = "<!-- written by docs/write_limits.py -->\n", "<!-- end -->\n"
PLACES = {"epp": "`--epp`", "slices": "slices", "calls": "calls", "no_gpu": "no GPU"}


def as_code(text: str) -> str:
    """``text`` with its flags, and names with an underscore, as code."""
    return re.sub(r"(?<![\w./-])(-[\w.-]*[a-z\d]|[a-z]\w*_[\w.]*\w)(?![\w/])", r"`\1`", text)


def page(kept: str) -> str:
    """The page ``kept``, with the table as it is now."""
    table = "| what | where not | instead |\n|---|---|---|\n"
    for row in TABLE:
        places = {**PLACES, "epp": PLACES["epp"] if row.typed else UNTYPED}
        where = ", ".join(name for place, name in places.items() if getattr(row, place) is not None)
        table += f"| {as_code(row.what)} | {where} | {as_code(row.instead)} |\n"
    before, rest = kept.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


if __name__ == "__main__":
    FILE.write_text(page(FILE.read_text()))
