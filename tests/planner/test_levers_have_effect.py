"""Every lever of a planner changes some plan, asked for on the command line."""

import contextlib
import io
from functools import cache
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.planner.options import LEVERS, default_levers

pytestmark = pytest.mark.everything

MACHINE = ("--model", "gpt-7b", "--device", "a100-80g", "--pp", "4", "--cp", "8", "--zero", "3")
MACHINE += ("--multiple", "1", "--placement", "even")
LENGTHS = (2676, 16384, 3507, 16384)
TIGHT = ("--memory-budget-gib", "8", "--effort", "1")
# What makes the most of each lever: memory that binds, or short documents.
WHERE = {
    "wsplit": TIGHT,
    "offload": (*TIGHT, "--levers", "all"),
    "local": (
        *("--lengths", "wlb", "--context", "32768"),
        *("--global-batch-size", "256", "--effort", "1"),
    ),
}


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    return path


@cache
def plan(lengths: Path, *arguments: str) -> list[str]:
    """The lines of the plan that a command line makes, but for the promise."""
    shown, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told):
        status = main(["plan", "--lengths", str(lengths), *MACHINE, *arguments])
    assert status == 0, told.getvalue()
    return [line for line in shown.getvalue().splitlines() if not line.startswith("predicted")]


@pytest.mark.parametrize("lever", LEVERS)
def test_every_lever_changes_a_plan(lever: str, lengths: Path) -> None:
    where = WHERE[lever]
    levers = "default" if lever in default_levers("a100-80g") else f"default,{lever}"
    if "--levers" in where:
        levers = where[where.index("--levers") + 1]
    on = plan(lengths, *where, "--levers", levers)
    assert plan(lengths, *where, "--levers", f"{levers},-{lever}") != on
