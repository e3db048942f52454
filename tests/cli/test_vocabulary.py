"""--vocab-parallel through the command line: what it changes, keeps and refuses."""

import json

import pytest

from megatron_epp.ir import Plan, check
from tests.cli.commands import refused, said
from tests.cost.simple_device import OLD_H100

MACHINE = ["--model", "llama3-8b", "--device", OLD_H100, "--cp", 8, "--zero", 1]
LENGTHS = [60_000, 20_000, 9_000] + [4_000] * 12 + [900] * 20


def planned(capsys, lengths: str, *words) -> dict:
    given = ("plan", "--lengths", lengths, *MACHINE, "--pp", 4, "--effort", 1, "--json", *words)
    return json.loads(said(capsys, *given))


def test_it_changes_the_plan_and_its_promise(capsys, lengths) -> None:
    off, on = (planned(capsys, lengths, "--vocab-parallel", how) for how in ("off", "on"))
    assert planned(capsys, lengths)["plan"] == on["plan"]  # the default: auto
    assert not Plan.parse(off["plan"]).vocabulary_parallel
    plan = Plan.parse(on["plan"])
    check(plan)
    assert plan.vocabulary_parallel
    assert on["seconds"] < 0.97 * off["seconds"] and on["bubble_ratio"] < off["bubble_ratio"]
    evaluation = said(
        capsys,
        *("plan", "--lengths", lengths, *MACHINE, "--pp", 4, "--forward-only"),
        *("--vocab-parallel", "on"),
    )
    evaluated = Plan.parse(evaluation)
    assert evaluated.forward_only and evaluated.vocabulary_parallel


def test_auto_says_what_it_took(capsys, lengths) -> None:
    words = ("plan", "--lengths", lengths, *MACHINE, "--effort", 1)
    from megatron_epp.__main__ import main

    assert main([*map(str, words), "--pp", "4"]) == 0
    shown = capsys.readouterr()
    assert Plan.parse(shown.out).vocabulary_parallel
    line = next(line for line in shown.err.splitlines() if line.startswith("vocabulary"))
    assert line.startswith("vocabulary parallelism: on; compared with off, on takes ")
    assert line.endswith("% less time (simulated)")
    assert main([*map(str, words), "--pp", "1", "--tp", "1"]) in (0, 2)  # one stage: nothing to cut
    assert "vocabulary" not in capsys.readouterr().err
    # What no training gains by, or runs.
    on_cpus = ("--model", "gpt-7b", "--device", "cpu", "--pp", 2)
    for machine, why in (
        (on_cpus, "on a CPU it took 1.16 of the time (measured)"),
        (
            ("--model", "qwen3-30b-a3b", *MACHINE[2:4], "--pp", 2, "--dp", 2, "--ep", 2),
            "experts ar",
        ),
    ):
        given = ("plan", "--lengths", lengths, *machine, "--effort", 0, "--planner", "packing")
        assert main([*map(str, given), "--memory-budget-gib", "900"]) == 0
        shown = capsys.readouterr()
        assert f"vocabulary parallelism: off; {why}" in shown.err
        assert " H0 " not in shown.out


def test_a_plan_file_brings_it_along(capsys, lengths, tmp_path) -> None:
    path = tmp_path / "cut.plan"
    given = ("plan", "--lengths", lengths, *MACHINE, "--pp", 4, "--effort", 0, "-o", path)
    said(capsys, *given, "--vocab-parallel", "on")
    head = path.read_text().splitlines()[0]
    assert head.startswith("# made for: ") and "--vocab-parallel on" in head
    facts = json.loads(said(capsys, "simulate", path, "--json"))
    assert facts["seconds"] == pytest.approx(facts["predicted_seconds"])
    assert facts["gap"] >= 0
    assert "ok: " in said(capsys, "check", path)
    drawn = said(capsys, "draw", path)
    assert "H vocabulary" in drawn and "G vocabulary: weight gradient" in drawn
    for ending in ("svg", "html", "json"):
        picture = tmp_path / f"x.{ending}"
        said(capsys, "draw", path, "-o", picture)
        assert "H0" in picture.read_text()
    told = refused(capsys, "draw", path, "-o", tmp_path / "x.csv")
    assert "x.csv: the CSV of torch.distributed.pipelining was removed" in told
    told = refused(capsys, "simulate", path, "--vocab-parallel", "off")
    assert "--vocab-parallel off: the plan has ops H and G; leave the option out" in told
    said(capsys, *given, "--vocab-parallel", "off")
    assert "vocab" not in path.read_text().splitlines()[0]
    told = refused(capsys, "draw", path, "--vocab-parallel", "on")
    assert "the plan has no ops H and G" in told


def test_compare_says_so(capsys, lengths) -> None:
    given = ("compare", "--lengths", lengths, *MACHINE, "--pp", 4, "--effort", 0, "--planner")
    table = said(capsys, *given, "epp", "packing", "flexsp", "--vocab-parallel", "on")
    assert "layers 4 x 8, vocabulary over the stages" in " ".join(table.split())
    table = said(capsys, *given, "epp", "packing", "flexsp")
    assert "layers 4 x 8; epp with the vocabulary over the stages" in " ".join(table.split())
    rows = {
        how: {
            row["planner"]: row["seconds"]
            for row in json.loads(
                said(capsys, *given, "epp", "packing", "flexsp", "--json", "--vocab-parallel", how)
            )
        }
        for how in ("on", "off", "auto")
    }
    others = ("packing", "flexsp")  # what one has without this project
    assert rows["auto"] == {
        "epp": rows["on"]["epp"],
        **{name: rows["off"][name] for name in others},
    }
    assert rows["on"]["epp"] < rows["off"]["epp"]
    assert rows["on"]["packing"] != rows["off"]["packing"]  # its strict order has no slack for H
    assert rows["on"]["flexsp"] == rows["off"]["flexsp"]  # it has no stages


def test_tune_looks_at_it(capsys, tmp_path) -> None:
    lengths = tmp_path / "more.txt"
    lengths.write_text("\n".join(map(str, LENGTHS * 4)))
    given = (
        *("tune", "--lengths", lengths, *MACHINE[:4], "--nodes", 4, "--effort", 0, "--json"),
        *("--batches", 1, "--pp", 4, "--cp", 8),
    )
    script = tmp_path / "run.sh"
    off = json.loads(said(capsys, *given, "--vocab-parallel", "off", "--script", script))["choices"]
    assert all("vocabulary_parallel" not in choice for choice in off)
    assert "--epp-vocab-parallel off" in script.read_text()
    auto = json.loads(said(capsys, *given, "--script", script))
    first = auto["choices"][0]
    assert first["vocabulary_parallel"] and first["seconds"] < off[0]["seconds"]
    assert "--epp-vocab-parallel on" in script.read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("plan", "--pp", 1, "--vocab-parallel", "on"),
            "--vocab-parallel on cuts the output layer over the stages, and there is one",
        ),
        (
            ("plan", "--pp", 2, "--vocab-parallel", "yes"),
            "'yes': expected auto, on, off",
        ),
        (
            ("plan", "--pp", 2, "--vocab-parallel", "on", "--planner", "flexsp"),
            "--vocab-parallel on has no effect on flexsp, which makes no pipeline plan",
        ),
    ],
)
def test_what_cannot_be_is_refused(capsys, lengths, words, told) -> None:
    command, *others = words
    assert told in refused(capsys, command, "--lengths", lengths, *MACHINE, *others)
