"""A copy of the package in which lines are added: what tests of its open doors share."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megatron_epp"
# By file, what is written and before which line.
Edits = Mapping[str, Sequence[tuple[str, str]]]


def run_with(edits: Edits, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``program`` with the copy, in ``folder``, as its package."""
    copy = folder / "megatron_epp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "mcore", "control"))
    for name, changes in edits.items():
        path = copy / name
        text = path.read_text()
        for line, added in changes:
            assert text.count(line) == 1, (name, line)
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
