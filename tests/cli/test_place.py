"""The command line with a plan that places several stages on a rank."""

import json
import re
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Plan
from megatron_epp.show.units import GIB
from tests.cli.commands import said
from tests.cost.simple_device import OLD_H100
from tests.plans import INTERLEAVED, V_SHAPE

MACHINE = ("--model", "gpt-7b", "--device", "a100-80g", "--cp", "8")


@pytest.fixture(params=[INTERLEAVED, V_SHAPE], ids=["interleaved", "v"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "placed.plan"
    text = request.param.replace("layers 1 1 1 1", "layers 8 8 8 8")
    path.write_text(re.sub(r"1([kf])\b", r"8\1", text))
    return path


def test_check(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "check", plan).startswith(
        "ok: 2 documents, 15 tokens in 2 chunks on 4 stages on 2 ranks, 16 ops; digest "
    )
    budget = 1.2 * states_bytes(plan) / GIB  # enough for each stage, not for two of them
    asked = ("--multiple", "1", "--memory-budget-gib", f"{budget:.3f}")
    assert main(["check", str(plan), *MACHINE, *asked]) == 2
    error = capsys.readouterr().err
    assert re.search(r"error: rank 0 at F[23]\.1: holds .* GiB, the budget is .* GiB", error), error


def test_a_budget_is_one_number_or_one_for_every_pipeline_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two ranks with two stages each: of each device, not of each stage."""
    batch = ("--lengths", "wlb", "--global-batch-size", "8", "--context", "8192")
    path = tmp_path / "v.plan"
    budget = ("--memory-budget-gib", "60", "70")
    v = ("--pp", "2", "--placement", "v", "--effort", "0")
    summary = said(capsys, "plan", *batch, *MACHINE, *v, *budget, "-o", path)
    assert "of 60.00 70.00" in summary
    assert Plan.parse(path.read_text()).place == (1, 0, 0, 1)
    # Its comment says so to simulate; one number for every stage means the same where it is one.
    for given in ((), budget, ("--memory-budget-gib", "70", "60", "60", "70")):
        facts = json.loads(said(capsys, "simulate", path, *given, "--json"))
        assert facts["budget_bytes"] == [60 * GIB, 70 * GIB]
    for gib in (("70", "60", "60", "71"), ("1", "2", "3")):
        assert main(["simulate", str(path), "--memory-budget-gib", *gib]) == 2
        assert capsys.readouterr().err.endswith(
            f"--memory-budget-gib: {len(gib)} numbers for 2 pipeline ranks; expected one, or one "
            "for each of them\n"
        )
    told = said(capsys, "compare", *batch, *MACHINE, *v, *budget, "--planner", "epp", "packing")
    assert "fits the memory budget" in told


def states_bytes(plan: Path) -> float:
    """Of one stage."""
    layers = Plan.parse(plan.read_text()).layers
    return max(named_cost("gpt-7b", "a100-80g", pp=4, cp=8, layers=layers).memory.states_bytes)


def test_simulate(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(said(capsys, "simulate", plan, *MACHINE, "--json"))
    for name in ("peak_bytes", "budget_bytes", "states_bytes", "idle_seconds"):
        assert len(facts[name]) == 2
    assert {bubble.get("rank") for bubble in facts["bubbles"]} <= {0, 1}
    assert min(facts["states_bytes"]) > states_bytes(plan)
    busy = [facts["seconds"] - idle for idle in facts["idle_seconds"]]
    assert 0.6 * max(busy) <= facts["lower_bound_seconds"] <= facts["seconds"]
    table = said(capsys, "simulate", plan, *MACHINE)
    assert "of ranks x time" in table
    assert [line.split()[0] for line in table.split("\n") if " + " in line] == ["0", "1"]


def test_draw(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "draw", plan, "--width", "120")
    assert "4 stages on 2 ranks, 2 chunks" in text
    rows = [line for line in text.split("\n") if line.startswith("rank ")]
    assert len(rows) == 2 and "F0.0" in rows[0] and "B1.1" in rows[1]
    for ending in ("svg", "png", "html", "json"):
        said(capsys, "draw", plan, "-o", tmp_path / f"x.{ending}")
    svg = (tmp_path / "x.svg").read_text()
    assert "rank 1" in svg and ">F1.0<" in svg and "stage 1</text>" not in svg
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    assert '"ranks":["rank 0","rank 1"]' in (tmp_path / "x.html").read_text()


def test_a_placement_is_chosen_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For few micro-batches several stages on a rank, for many one; either way a line says why."""
    machine = ("--model", "llama3-8b", "--device", "h100-80g", "--pp", "2", "--tp", "8")
    asked = ("--placement", "auto", "--planner", "packing", "--effort", "0", "--context", "8192")
    for documents, several in ((4, True), (48, False)):
        lengths, path = tmp_path / "lengths", tmp_path / "chosen.plan"
        lengths.write_text("8000\n" * documents)
        words = ("--lengths", str(lengths), *machine, *asked, "-o", str(path))
        assert main(["plan", *words]) == 0
        told = capsys.readouterr().err
        line = next(line for line in told.splitlines() if line.startswith("placement: "))
        assert ("less time" in line) and ("placement: even" in line) != several
        assert bool(Plan.parse(path.read_text()).place) == several
    assert main(["plan", *words, "--layers", "16", "16"]) == 2
    assert "--placement auto chooses the layers of the stages" in capsys.readouterr().err
    assert main(["compare", *words[:-2], "--planner", "epp", "1f1b"]) == 0


def test_tune_writes_the_placement_it_has_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four documents for eight ranks: without --placement auto one stage a rank."""
    lengths, script = tmp_path / "lengths", tmp_path / "run.sh"
    lengths.write_text("8000\n" * 4)
    machine = ("--model", "llama3-8b", "--device", OLD_H100, "--nodes", "8")
    layout = ("--tp", "8", "--pp", "8", "--dp", "1", "--levers", "none", "--effort", "0")
    words = ("tune", "--lengths", lengths, *machine, *layout, "--script", script)
    said(capsys, *words)
    assert "--epp-placement" not in script.read_text()
    told = said(capsys, *words, "--placement", "auto")
    text = script.read_text()
    assert "--epp-placement v" in told and "--epp-cost-model analytic" in text
    found = re.search(r"--epp-placement 'place ([\d ]+) layers ([\d ]+)'", text)
    assert found is not None and found[1] == "7 6 5 4 3 2 1 0 0 1 2 3 4 5 6 7"
    assert sum(map(int, found[2].split())) == 32
