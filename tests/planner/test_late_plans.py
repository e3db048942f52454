"""Layouts whose plans take longer than their iterations are said to be late."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.build import named_cost
from megatron_epp.planner.feasibility import late_plans, planning_load
from megatron_epp.planner.tuning import survey


@pytest.mark.parametrize(
    ("pp", "tp", "replicas_of_a_host"), [(2, 1, 4), (4, 2, 1), (8, 8, 1), (1, 4, 2)]
)
def test_planning_is_measured_by_what_a_host_has(pp: int, tp: int, replicas_of_a_host: int) -> None:
    """A core for each of eight devices, and every replica of the host plans."""
    cost = named_cost("llama3-8b", "h100-80g", pp=pp, tp=tp, dp=8, zero=1, topology="nodes")
    assert planning_load(cost, 2.0, 0.5) == 2.0 * replicas_of_a_host / (0.5 * 8)
    just = 0.5 * 8 / replicas_of_a_host
    assert late_plans(cost, just, 0.5) is None
    line = late_plans(cost, 3 * just, 0.5)
    assert line is not None and "take 3.0 times" in line and "--effort" in line
    unknown = cost.replace(network=None)
    assert late_plans(unknown, 1e9, 0.5) is None


def test_a_host_of_an_nvlink_domain_plans_for_its_own_devices() -> None:
    """A host of GB200 has 4 of the 64 devices that NVLink joins."""
    cost = named_cost("llama3-8b", "gb200-186g", pp=2, tp=1, dp=8, zero=1, topology="nodes")
    assert planning_load(cost, 2.0, 0.5) == 2.0 * 2 / (0.5 * 4)


@pytest.mark.everything
def test_plan_and_compare_say_it_of_many_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("4000\n900\n" * 8)
    words = ["--lengths", str(lengths), "--model", "llama3-8b", "--device", "h100-80g"]
    words += ["--pp", "2", "--tp", "4", "--context", "4096", "--global-batch-size", "16"]
    words += ["--vocab-parallel", "off", "--placement", "even"]
    monkeypatch.setattr("megatron_epp.planner.feasibility.PLANNING_CORES", 1e-9)
    for command in (["plan", "-o", str(tmp_path / "p")], ["compare", "--planner", "epp"]):
        assert main([*command, *words, "--dp", "2"]) == 0
        assert "would wait for its plans" in " ".join(capsys.readouterr().out.split())
        assert main([*command, *words, "--dp", "1"]) == 0
        assert "would wait" not in capsys.readouterr().out


@pytest.mark.everything
def test_tune_marks_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """In the table and in JSON, of --epp alone; and ranks by seconds, as before."""
    words = ["tune", "--lengths", "wlb", "--model", "gpt-7b", "--device", "h100-80g", "--gpus", "8"]
    words += ["--context", "8192", "--global-batch-size", "16", "--batches", "1", "--pp", "2"]
    words += ["--tp", "4", "--vocab-parallel", "off", "--placement", "even"]
    real = survey.planning_load

    def load(late: bool) -> None:
        monkeypatch.setattr(
            survey, "planning_load", lambda *of: real(*of) * 0 + (2.0 if late else 0.5)
        )

    load(late=True)
    assert main(words) == 0
    table = capsys.readouterr().out
    rows = [line for line in table.splitlines() if "even    --epp" in line]
    assert rows and all("late" in row for row in rows)
    assert all("late" not in row for row in table.splitlines() if "stock" in row)
    assert main([*words, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert all(("late" in each) == (each["planner"] == "epp") for each in choices)
    load(late=False)
    assert main([*words, "--json"]) == 0
    punctual = json.loads(capsys.readouterr().out)["choices"]
    for each in choices:
        each.pop("late", None)
    assert punctual == choices


def test_what_this_machine_takes_makes_no_choice_another() -> None:
    fields = {each.name: each.compare for each in dataclasses.fields(survey.Choice)}
    assert not fields["planning_load"]
