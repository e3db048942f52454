"""A copy of the package in which lines are added: what tests of its open doors share."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forks import Ended, run_with_torch

PACKAGE = Path(__file__).parents[2] / "megatron_epp"
# By file, what is written and before which line; before nothing: the file is new.
Edits = Mapping[str, Sequence[tuple[str, str]]]


def run_with(
    edits: Edits, program: str, folder: Path, without: Sequence[str] = ("mcore", "control")
) -> Ended:
    """``program`` with the copy, in ``folder``, as its package; ``without`` these rooms."""
    copy = folder / "megatron_epp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", *without))
    for name, changes in edits.items():
        path = copy / name
        text = path.read_text() if path.exists() else ""
        for line, added in changes:
            assert text.count(line) == 1 or not text + line, (name, line)
            text = text.replace(line, added + line)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return run_with_torch(program, folder, {"NUMBA_DISABLE_JIT": "1"})  # such plans are small
