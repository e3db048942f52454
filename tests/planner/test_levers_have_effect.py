"""Every lever and every option of a planner changes some plan, asked for on the command line."""

import contextlib
import dataclasses
import io
from functools import cache
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.planner import ALL, LEVERS, PLANNERS, Options, balance_replicas, plan_step
from megatron_epp.planner.options import default_levers
from tests.planner.cases import machine

pytestmark = pytest.mark.everything

MACHINE = ("--model", "gpt-7b", "--device", "a100-80g", "--pp", "4", "--cp", "8")
MACHINE += ("--multiple", "1")
LENGTHS = (2676, 16384, 3507, 16384)
TIGHT = ("--memory-budget-gib", "8", "--effort", "1")
# The output layer lies on the last stage alone: what it takes makes layers uneven.
HEAD = ("--model", "llama3-8b", "--vocab-parallel", "off", "--effort", "0", "--levers", "all")
# What makes the most of each lever: memory that binds, an output layer that takes time, or neither.
WHERE = {
    "chunks": TIGHT,
    "bins": TIGHT,
    "window": TIGHT,
    "wsplit": TIGHT,
    "trim": TIGHT,
    "selective": TIGHT,
    "offload": (*TIGHT, "--levers", "all,-uneven"),
    "exact": TIGHT,
    "uneven": HEAD,
    "search": TIGHT,
    "persist": ("--memory-budget-gib", "8", "--effort", "0"),
    "hedge": (
        *("--model", "llama3-8b", "--device", "h100-80g", "--pp", "2", "--cp", "1", "--tp", "8"),
        *("--effort", "1"),
    ),
    "lean": (
        *("--model", "llama3-8b", "--device", "h100-80g", "--lengths", "prolong", "--batch", "7"),
        *("--context", "65536", "--global-batch-size", "64", "--effort", "1"),
        *("--levers", "default,wsplit"),
    ),
    "local": (
        *("--lengths", "wlb", "--context", "32768"),
        *("--global-batch-size", "256", "--effort", "1"),
    ),
}
# By field of Options, and by the multiple, two command lines that differ in nothing else.
FIELDS = {
    "context": (("--planner", "packing"), ("--planner", "packing", "--context", "40000")),
    "levers": ((*TIGHT, "--levers", "default"), (*TIGHT, "--levers", "none")),
    "effort": (("--effort", "0"), ("--effort", "1")),
    "multiple": (("--effort", "0"), ("--effort", "0", "--multiple", "128")),
    "lockstep": (
        ("--dp", "2", "--effort", "0"),
        ("--dp", "2", "--effort", "0", "--lockstep", "2"),
    ),
    "open_layers": (
        HEAD,
        (*HEAD, "--layers", "8", "8", "8", "8"),
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


@pytest.mark.parametrize(
    "field", ["multiple", *(field.name for field in dataclasses.fields(Options))]
)
def test_every_option_changes_a_plan(field: str, lengths: Path) -> None:
    one, other = FIELDS[field]
    assert plan(lengths, *one) != plan(lengths, *other)
    assert plan(lengths, *one) == plan.__wrapped__(lengths, *one)


def test_layers_are_open_where_nobody_names_them(
    lengths: Path, capsys: pytest.CaptureFixture
) -> None:
    assert "layers 8 8 8 8" not in plan(lengths, *HEAD)
    assert "layers 8 8 8 8" in plan(lengths, *HEAD, "--layers", "8", "8", "8", "8")
    both = ("--levers", "all,uneven", "--layers", "8", "8", "8", "8")
    assert main(["plan", "--lengths", str(lengths), *MACHINE, *both]) == 2
    assert (
        "--layers names the layers of every stage and the lever uneven" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("batch", "same"),
    [([30_000] * 2 + [500] * 100 + [3_000] * 11, True), ([60_000] + [1_000] * 60, False)],
)
def test_replicas_have_the_same_layers(batch: list[int], same: bool) -> None:
    """Whether each alone wants the same ones or others."""
    cost = machine(pp=4, head_seconds=True)
    options = Options(levers=ALL, effort=0, open_layers=True)
    assignments = balance_replicas(batch, cost, 2)
    alone = {
        PLANNERS["epp"]([batch[d] for d in held], cost, options).plan.layers for held in assignments
    }
    assert (len(alone) == 1) == same
    made = plan_step(batch, cost, options, "epp", 2)
    even = plan_step(batch, cost, dataclasses.replace(options, open_layers=False), "epp", 2)
    assert len({found.plan.layers for found in made.planned}) == 1
    assert made.seconds < even.seconds if same else made.seconds <= even.seconds
