"""A copy of the package in which lines are added: what tests of its open doors share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_epp"
# By file, what is written and before which line; before nothing: the file is new.
Edits = Mapping[str, Sequence[tuple[str, str]]]


def run_with(
    edits: Edits, program: str, folder: Path, without: Sequence[str] = ("mcore", "control")
) -> subprocess.CompletedProcess[str]:
    """``program`` with the copy, in ``folder``, as its package; ``without`` these rooms."""
    copy = folder / "megatron_epp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", *without))
    for name, changes in edits.items():
        path = copy / name
        text = path.read_text() if path.exists() else ""
        for line, added in changes:
            assert text.count(line) == 1 or not text + line, (name, line)
            text = text.replace(line, added + line)
        path.write_text(text)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},  # compiling takes longer than such plans
        capture_output=True,
        text=True,
        check=False,
    )
