"""--vocab-parallel through the command line: what it changes and keeps."""

import re
from pathlib import Path

import pytest

from megatron_epp.ir import Plan, check
from tests.cli.commands import Commands
from tests.cost.simple_device import OLD_H100

JOB = (
    f"--lengths many --model llama3-8b --device {OLD_H100} --cp 8 --zero 1 --pp 4 --placement even"
)
MANY = [60_000, 20_000, 9_000] + [4_000] * 12 + [900] * 20


@pytest.fixture(autouse=True)
def many(folder: Path) -> None:
    Path("many").write_text("\n".join(map(str, MANY)))
    Path("more").write_text("\n".join(map(str, MANY * 4)))


def test_it_changes_the_plan_and_its_promise_and_auto_says_what_it_took(cli: Commands) -> None:
    line = f"plan {JOB} --effort 1"
    off, on = (cli.facts(f"{line} --vocab-parallel {how}") for how in ("off", "on"))
    assert not Plan.parse(off["plan"]).vocabulary_parallel
    plan = Plan.parse(on["plan"])
    check(plan)
    assert plan.vocabulary_parallel
    assert on["seconds"] < 0.97 * off["seconds"] and on["bubble_ratio"] < off["bubble_ratio"]
    evaluated = Plan.parse(cli.said(f"{line} --forward-only --vocab-parallel on"))
    assert evaluated.forward_only and evaluated.vocabulary_parallel

    shown = cli.ran(line)  # the default: auto
    assert shown.out == on["plan"]
    told = next(line for line in shown.err.splitlines() if line.startswith("stages: "))
    assert ", vocabulary parallelism; compared with one stage a rank" in told
    assert re.search(r": vocabulary parallelism takes \S+% less time;? .*\(simulated\)$", told)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ("--model gpt-7b --device cpu --pp 2", "on a CPU it took 1.16 of the time (measured)"),
        (f"--model qwen3-30b-a3b --device {OLD_H100} --pp 2 --dp 2 --ep 2", "experts ar"),
    ],
)
def test_auto_is_off_where_training_gains_nothing(cli: Commands, machine: str, why: str) -> None:
    job = f"--lengths many {machine} --effort 0 --planner packing --memory-budget-gib 900"
    shown = cli.ran(f"plan {job}")
    assert f"vocabulary parallelism: off; {why}" in shown.err
    assert " H0 " not in shown.out


def test_one_stage_has_nothing_to_cut(cli: Commands) -> None:
    assert "vocabulary" not in cli.ran(f"plan {JOB} --effort 0 --pp 1 --planner packing").err


def test_a_plan_file_brings_it_along(cli: Commands) -> None:
    line = f"plan {JOB} --effort 0 -o cut.plan"
    cli.said(f"{line} --vocab-parallel on")
    head = Path("cut.plan").read_text().splitlines()[0]
    assert head.startswith("# made for: ") and "--vocab-parallel on" in head
    facts = cli.facts("simulate cut.plan")
    assert facts["seconds"] == pytest.approx(facts["predicted_seconds"])
    assert facts["gap"] >= 0
    assert "ok: " in cli.said("check cut.plan")
    drawn = cli.said("draw cut.plan")
    assert "H vocabulary" in drawn and "G vocabulary: weight gradient" in drawn
    for ending in ("svg", "html", "json"):
        cli.said(f"draw cut.plan -o x.{ending}")
        assert "H0" in Path(f"x.{ending}").read_text()
    told = cli.refused("simulate cut.plan --vocab-parallel off")
    assert "--vocab-parallel off: the plan has ops H and G; leave the option out" in told
    cli.said(f"{line} --vocab-parallel off")
    assert "vocab" not in Path("cut.plan").read_text().splitlines()[0]


@pytest.mark.everything
def test_compare_says_so(cli: Commands) -> None:
    line = f"compare {JOB} --effort 0 --planner epp packing flexsp"
    table = cli.joined(f"{line} --vocab-parallel on")
    assert "layers 4 x 8, vocabulary over the stages" in table
    assert "layers 4 x 8; epp with the vocabulary over the stages" in cli.joined(line)
    on, off, auto = (
        {row["planner"]: row["seconds"] for row in cli.facts(f"{line} --vocab-parallel {how}")}
        for how in ("on", "off", "auto")
    )
    assert auto == {**off, "epp": on["epp"]}  # others: what one has without this project
    assert on["epp"] < off["epp"]
    assert on["packing"] != off["packing"]  # its strict order has no slack for H
    assert on["flexsp"] == off["flexsp"]  # it has no stages


def test_tune_looks_at_it(cli: Commands) -> None:
    line = (
        f"tune --lengths more --model llama3-8b --device {OLD_H100} --nodes 4 --effort 0 "
        "--batches 1 --pp 4 --cp 8 --script run.sh"
    )
    off = cli.facts(f"{line} --vocab-parallel off")["choices"]
    assert all("vocabulary_parallel" not in choice for choice in off)
    assert "--epp-vocab-parallel off" in Path("run.sh").read_text()
    first = cli.facts(line)["choices"][0]
    assert first["vocabulary_parallel"] and first["seconds"] < off[0]["seconds"]
    assert "--epp-vocab-parallel on" in Path("run.sh").read_text()
