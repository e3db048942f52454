"""The command line: what it prints, what it refuses, and that it never shows a traceback."""

import dataclasses
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cli.options import COMMANDS, DOING
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES, device
from megatron_epp.cost.catalogue.models import model
from megatron_epp.ir import Plan, Step, check, parse_records
from megatron_epp.planner import TRAINING_LEVERS
from tests import programs
from tests.cli.commands import LENGTHS, printed, refused
from tests.corpus.test_idx_file import write_pair
from tests.programs import python
from tests.show.plans import EXAMPLE

# A small machine: plans in a blink.
MACHINE = ["--model", "gpt-7b", "--device", "a100-80g", "--cp", "8"]
# Nothing is recomputed.
PLAN = re.sub("recompute.*\n", "", EXAMPLE).replace("layers 4 4", "layers 16 16")


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "a.plan"
    path.write_text(PLAN)
    return str(path)


# ------------------------------------------------------------------ what it does


def test_plan_prints_a_plan_that_passes(capsys, lengths):
    shown = printed(capsys, "plan", "--lengths", lengths, "--pp", 2, *MACHINE)
    made = Plan.parse(shown.out)
    check(made)
    assert made.documents == LENGTHS  # all of the file, in its order
    assert "lower bound" in shown.err and "gap" in shown.err
    assert "\nhow         chunks of about 1/" in shown.err


def test_plan_writes_simulate_agrees_check_passes(capsys, lengths, tmp_path):
    path, records = tmp_path / "x.plan", tmp_path / "x.timed"
    shown = printed(capsys, "plan", "--lengths", lengths, "--pp", 2, *MACHINE, "-o", path, "--json")
    promised = json.loads(shown.out)
    written = path.read_text()
    assert written == f"# made for: {' '.join(MACHINE)} --multiple 32\n{promised['plan']}"
    assert str(Plan.parse(written)) == promised["plan"]
    assert "ok: 7 documents" in printed(capsys, "check", path).out
    assert printed(capsys, "check", path, *MACHINE).out.startswith("ok: ")
    shown = printed(capsys, "simulate", path, *MACHINE, "--json", "-o", records)
    played = json.loads(shown.out)
    for name in ("seconds", "bubble_ratio", "recompute_ratio", "comm_ratio", "gap"):
        assert played[name] == pytest.approx(promised[name], rel=1e-9, abs=1e-12)
    assert played["peak_bytes"] == promised["peak_bytes"]
    assert played["fits"] is promised["fits"] is True
    assert max(r.stop for r in parse_records(records.read_text())) == played["seconds"]


@pytest.mark.slow
def test_plan_offloads_where_memory_is_tight(capsys, lengths, tmp_path):
    """All levers do, those of training do not; a machine without a host link refuses the plan."""
    tight = ["--lengths", lengths, "--pp", 2, *MACHINE, "--memory-budget-gib", 10]
    path, other = tmp_path / "x.plan", tmp_path / "y.plan"
    shown = printed(capsys, "plan", *tight, "--levers", "all", "-o", path).out
    share = next(line.split()[1] for line in shown.splitlines() if line.startswith("offloaded "))
    letters = "".join(c for stage in Plan.parse(path.read_text()).recompute for c in stage)
    assert "o" in letters and 0 < float(share.rstrip("%")) < 100
    text = printed(capsys, "simulate", path, *MACHINE, "--memory-budget-gib", 10).out
    assert f"offloaded   {share} of what layers save" in text
    assert f", offloaded {share}" in printed(capsys, "draw", path, *MACHINE).out
    assert "ok: 7 documents" in printed(capsys, "check", path).out
    little = [*tight, "--host-memory-gib", 1]
    told = printed(capsys, "plan", *little, "-o", other).out  # by default
    offloaded = next(line for line in told.splitlines() if line.startswith("offloaded "))
    assert float(offloaded.split()[1].rstrip("%")) < float(share.rstrip("%"))
    assert max(map(float, re.findall(r" (\d+\.\d\d)(?= )", offloaded.split("host")[1]))) <= 1
    assert "--host-memory-gib has no effect without the lever offload" in refused(
        capsys, "plan", *little, "--levers", "default,-offload"
    )
    for levers in ("default", "all,-offload"):
        shown = printed(capsys, "plan", *tight, "--levers", levers, "-o", other).out
        letters = "".join(c for stage in Plan.parse(other.read_text()).recompute for c in stage)
        assert "o" not in letters and "offloaded" not in shown
    unlinked = ["--model", "gpt-7b", "--device", "cpu", "--cp", 1, "--memory-budget-gib", 500]
    for command in ("simulate", "draw", "check"):
        told = refused(capsys, command, path, *unlinked)
        assert "the cost model of cpu has no rate to the host's memory" in told


def test_simulate_explains(capsys, plan):
    text = printed(capsys, "simulate", plan, *MACHINE).out
    assert "critical path" in text and "waits for" in text and "peak GiB" in text
    noisy = printed(capsys, "simulate", plan, *MACHINE, "--noise", "0.05", "--json").out
    quiet = printed(capsys, "simulate", plan, *MACHINE, "--json").out
    assert json.loads(noisy)["seconds"] != json.loads(quiet)["seconds"]


@pytest.mark.parametrize("ending", ["svg", "png", "html", "txt", "json"])
def test_draw_writes_every_format(capsys, plan, tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    beginnings = {
        "svg": b"<svg ",
        "png": b"\x89PNG",
        "html": b"<!doctype html>",
        "txt": b"a.plan",
        "json": b'{"displayTimeUnit"',
    }
    for machine in ([], MACHINE):
        printed(capsys, "draw", plan, "-o", path, *machine)
        assert path.read_bytes().startswith(beginnings[ending])
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_draw_without_a_file_draws_on_the_terminal(capsys, plan):
    text = printed(capsys, "draw", plan).out
    assert "stage 0 |F0" in text and "12 units" in text
    assert "ms" in printed(capsys, "draw", plan, *MACHINE).out


def test_draw_puts_what_was_measured_below_the_prediction(capsys, plan, tmp_path):
    records, page = tmp_path / "x.timed", tmp_path / "x.html"
    printed(capsys, "simulate", plan, *MACHINE, "--noise", "0.1", "-o", records)
    printed(capsys, "draw", plan, *MACHINE, "--records", records, "-o", page)
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    predicted, measured = data["runs"]
    assert predicted["title"].endswith("predicted") and measured["title"].endswith("measured")
    assert predicted["seconds"] != measured["seconds"]
    printed(capsys, "draw", plan, "--records", records, "-o", page)
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    assert len(data["runs"]) == 1


FIELDS = {
    "batch": int,
    "planner": str,
    "levers": list,
    "seconds": float,
    "lower_bound_seconds": float,
    "gap": float,
    "bubble_ratio": float,
    "recompute_ratio": float,
    "comm_ratio": float,
    "peak_bytes": list,
    "plan_seconds": float,
    "chunks": int,
    "pipelines": int,
    "fits": bool,
}


def test_compare_lists_what_it_promises(capsys):
    common = ["--lengths", "wikipedia", "--context", 8192, "--global-batch-size", 40, "--pp", 2]
    found = json.loads(printed(capsys, "compare", *common, *MACHINE, "--batches", 2, "--json").out)
    for each in found:
        assert {name: type(each[name]) for name in FIELDS} == FIELDS
        assert each["seconds"] >= each["lower_bound_seconds"] > 0
        assert each["gap"] == pytest.approx(1 - each["lower_bound_seconds"] / each["seconds"])
    assert {each["batch"] for each in found} == {0, 1}
    planners = {each["planner"] for each in found}
    assert {"epp", "packing"} <= planners
    for batch in (0, 1):
        mine = {e["planner"]: e["seconds"] for e in found if e["batch"] == batch and e["fits"]}
        assert len({e["planner"] for e in found if e["batch"] == batch}) == len(planners)
        pipelines = {p: s for p, s in mine.items() if p not in ("flexsp", "megatron-hybrid-cp")}
        assert mine["epp"] <= min(pipelines.values()) * (1 + 1e-9)


def test_compare_begins_with_what_matters_and_explains_its_columns(capsys):
    common = ["--lengths", "wlb", "--context", 32768, "--global-batch-size", 24, "--pp", 4]
    text = printed(capsys, "compare", *common, *MACHINE, "--batches", 2).out
    first = " ".join(text.split("\n\n")[0].split())
    assert re.fullmatch(
        r"Best: epp, \S+ m?s a batch, \d\.\d\d times as fast as packing-best and "
        r"\d\.\d\d times as fast as infinipipe; it fits the memory budget on every batch\.",
        first,
    )
    assert max(map(len, text.splitlines())) <= 100
    header, _, rows = text.partition("planner  ")[2].partition("\n")
    for column in re.split(" {2,}", header.strip()):
        assert re.search(rf"^{column}  +\w", text, re.M), column
    table = {row.split()[0]: row.split() for row in rows.splitlines()[1:9]}
    assert f"{table['packing-best'][3]} times as fast as packing-best" in first
    assert not any(lever in text for lever in ("offload", "uneven"))  # not what training can run


def test_compare_says_that_nothing_fits(capsys, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("98304\n" * 8)
    words = ["--lengths", path, "--pp", 2, *MACHINE, "--memory-budget-gib", 20]
    text = printed(capsys, "compare", *words, "--planner", "chunkflow").out
    assert text.startswith("Best: none; no planner keeps every batch within the memory budget.")
    assert "0/1" in text
    text = printed(capsys, "compare", *words, "--planner", "chunkflow", "flexsp", "infinipipe").out
    assert " ".join(text.split("\n\n")[0].split()).endswith(
        " times as fast as infinipipe; it fits the memory budget on the batch. Training runs "
        "pipeline plans, which flexsp does not make."
    )


def test_the_levers_of_training_are_the_default(capsys, lengths, monkeypatch):
    """In plan and compare; what can only be simulated must be named, and on GPUs, where training
    does without, the split backward."""
    from megatron_epp.cli.options import parse
    from megatron_epp.cli.plan import options_of

    for command in ("plan", "compare"):
        words = ["--lengths", lengths]
        found = parse([command, *words, "--pp", "2", *map(str, MACHINE)])
        assert options_of(found).levers == TRAINING_LEVERS - {"wsplit"}
        on_a_cpu = parse([command, *words, "--pp", "2", "--model", "gpt-7b", "--device", "cpu"])
        assert options_of(on_a_cpu).levers == TRAINING_LEVERS
        known = parse([command, *words, "--pp", "2", *MACHINE, "--host-memory-gib", "9"])
        assert options_of(known).levers == TRAINING_LEVERS - {"wsplit"} | {"offload"}
        named = parse([command, *words, "--pp", "2", *MACHINE, "--levers", "default,wsplit"])
        assert options_of(named).levers == TRAINING_LEVERS


def test_tune_and_measured_costs_take_the_levers_of_their_device(tmp_path):
    from megatron_epp.cli.options import parse
    from megatron_epp.cli.plan import levers_of

    for name, without in (("h100-80g", {"wsplit"}), ("cpu", set())):
        words = ["--nodes", "1", "--lengths", "wlb"]
        found = parse(["tune", "--model", "gpt-7b", "--device", name, *words])
        assert levers_of(found) == TRAINING_LEVERS - without
        known = parse(
            ["tune", "--model", "gpt-7b", "--device", name, *words, "--host-memory-gib=9"]
        )
        assert ("offload" in levers_of(known)) == (name != "cpu")
        measured = profile(model("gpt-7b"), device(name), logits_held=False)
        measured.save(str(tmp_path / "costs.json"))
        words = ["--cost-model", str(tmp_path / "costs.json"), "--lengths", "wlb", "--pp", "2"]
        assert levers_of(parse(["plan", *words])) == TRAINING_LEVERS - without


# ------------------------------------------------------------------ the machine in a plan's comment


@pytest.fixture
def made(capsys, lengths, tmp_path):
    """A plan as ``plan -o`` writes it."""
    path = tmp_path / "made.plan"
    budget = ["--memory-budget-gib", 60.5, "--zero", 3, "--topology", "flat"]
    printed(
        capsys,
        *("plan", "--lengths", lengths, "--pp", 2, *MACHINE, *budget),
        *("--planner", "packing", "-o", path),
    )
    return path


def test_a_plan_brings_its_machine(capsys, made):
    budget = "--memory-budget-gib 60.5 --multiple 32 --zero 3 --topology flat"
    taken = f"{' '.join(MACHINE)} {budget}"
    assert made.read_text().startswith(f"# made for: {taken}\nplan v1\n")
    text = printed(capsys, "simulate", made).out
    assert text.startswith(f"machine     {taken} (the plan's own)\n")
    said = json.loads(printed(capsys, "simulate", made, "--json").out)
    assert said["seconds"] == pytest.approx(said["predicted_seconds"])
    named = printed(capsys, "simulate", made, *taken.split(), "--json").out
    assert json.loads(named) == said
    assert "units" not in printed(capsys, "draw", made).out


def test_a_named_option_stands_before_the_plans_own(capsys, made):
    text = printed(capsys, "simulate", made, "--device", "h200-141g", "--cp", 4).out
    assert text.startswith(
        "machine     --model gpt-7b --memory-budget-gib 60.5 --zero 3 --topology flat (the plan's"
    )
    facts = json.loads(printed(capsys, "simulate", made, "--memory-budget-gib", 50, "--json").out)
    assert facts["budget_bytes"] == [50 * 2**30] * 2


@pytest.mark.parametrize(
    ("comment", "reason"),
    [
        ("--model gpt-7b --device 'x", "No closing quotation"),
        ("--model gpt-7b --cp many", "--cp"),
        ("--model gpt-7b --device moved/device.json", "--device moved/device.json: no such file"),
        ("--model gpt-7b --shell rm", "unknown option '--shell'"),
    ],
)
def test_a_comment_that_cannot_be_used_is_ignored_with_a_line(capsys, plan, comment, reason):
    Path(plan).write_text(f"# mine\n# made for: {comment}\n{PLAN}")
    shown = printed(capsys, "draw", plan)
    assert "units" in shown.out
    assert shown.err.startswith(f"{plan}: its comment 'made for' is ignored: ")
    assert reason in shown.err and shown.err.count("\n") == 1
    # Behind the plan's first line it is a comment like any other.
    Path(plan).write_text(PLAN + f"# made for: {comment}\n")
    assert printed(capsys, "draw", plan).err == ""


def test_compare_says_where_epp_does_not_pay(capsys, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("64\n")  # one short document on one stage: nothing to cut or to balance
    text = printed(
        capsys, "compare", "--lengths", path, "--pp", 1, *MACHINE, "--planner", "epp", "packing"
    ).out
    assert "batch 0: epp does not pay" in text
    assert "it pays on 0 of 1 batches" in text


def test_overlong_documents_are_counted(capsys, lengths):
    for policy, words in (
        ("truncate", "2 truncated"),
        ("drop", "2 overlong dropped"),
        ("split", "2 split"),
    ):
        shown = printed(
            capsys,
            *("plan", "--lengths", lengths, "--pp", 2, *MACHINE),
            *("--context", 3000, "--overlong", policy),
        )
        assert words in shown.err
        assert max(Plan.parse(shown.out).documents) <= 3000


def test_an_index_gives_the_batches_of_training(capsys, tmp_path):
    path = write_pair(tmp_path / "corpus", [101, 1, 51, 2001, 31])
    common = ["plan", "--lengths", path, "--pp", 2, *MACHINE, "--context", 1000]
    shown = printed(capsys, *common)
    assert sorted(Plan.parse(shown.out).documents) == [30, 50, 100, 1000]
    assert "1 of fewer than 2 tokens skipped; 1 truncated" in shown.err
    first = printed(capsys, *common, "--global-batch-size", 2).out
    second = printed(capsys, *common, "--global-batch-size", 2, "--batch", 1).out
    drawn = Plan.parse(first).documents + Plan.parse(second).documents
    assert sorted(drawn) == [30, 50, 100, 1000]  # an epoch
    path.write_bytes(path.read_bytes()[:-3])
    assert "corpus.idx: truncated: 139 bytes" in refused(capsys, *common)


def test_replicas_make_a_step(capsys, lengths, tmp_path):
    path = tmp_path / "x.step"
    printed(capsys, "plan", "--lengths", lengths, "--pp", 2, "--dp", 2, *MACHINE, "-o", path)
    step = Step.parse(path.read_text())
    assert len(step.plans) == 2 and sorted(step.lengths) == sorted(LENGTHS)
    assert printed(capsys, "check", path).out.count("ok: ") == 2
    assert "stage 1" in printed(capsys, "draw", path, "--replica", 1).out
    assert "--replica 2" in refused(capsys, "draw", path, "--replica", 2)


def test_the_same_inputs_give_the_same_plan(capsys):
    common = ["plan", "--lengths", "prolong", "--global-batch-size", 24, "--context", 16384]
    common += ["--effort", 0]
    first, again = (printed(capsys, *common, "--pp", 2, *MACHINE).out for _ in range(2))
    assert first == again
    assert first != printed(capsys, *common, "--pp", 2, *MACHINE, "--batch", 1).out
    assert first != printed(capsys, *common, "--pp", 2, *MACHINE, "--seed", 1).out


@pytest.mark.parametrize("command", [None, *(c for c in COMMANDS if c not in DOING)])
def test_every_command_explains_itself_in_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["--help"] if command is None else [command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: megatron_epp" in shown
    assert max(map(len, shown.splitlines())) <= 80


# ------------------------------------------------------------------ what it refuses


COMMON = ("--pp", 2, *MACHINE)
WLB = ("plan", "--lengths", "wlb")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "--lengths", "wikpedia", *COMMON), ["did you mean wikipedia?"]),
        ((*WLB, "--pp", 33, *MACHINE), ["pp 33", "1 to 32, the layers"]),
        ((*WLB, "--pp", 0, *MACHINE), ["--pp", "at least 1"]),
        ((*WLB, *MACHINE), ["--pp is missing"]),
        ((*WLB, "--pp", 2), ["--model is missing", "gpt-13b"]),
        (
            (*WLB, *COMMON, "--memory-budget-gib", 0.5),
            ["0.5 GiB", "stage 0 needs more than", "for its model states"],
        ),
        ((*WLB, *COMMON, "--memory-budget-gib", -1), ["above 0, in GiB"]),
        ((*WLB, *COMMON, "--planner", "infinpipe"), ["infinipipe"]),
        ((*WLB, *COMMON, "--levers", "wspilt"), ["wsplit"]),
        ((*WLB, *COMMON, "--overlong", "splt"), ["did you mean split?"]),
        ((*WLB, *COMMON, "--contxt", 5), ["--contxt", "--context"]),
        ((*WLB, *COMMON, "--zero", 2), ["--zero", "1, 3"]),
        (
            (*WLB, "--pp", 2, "--model", "gpt-7", "--device", "cpu"),
            ["unknown model 'gpt-7'", "gpt-7b"],
        ),
        (
            (*WLB, "--pp", 2, "--model", "gpt-7b", "--device", "a100"),
            ["unknown device 'a100'", "a100-80g"],
        ),
        ((*WLB, *COMMON, "--layers", 8, 8, 16), ["3 numbers for 2 stages"]),
        ((*WLB, *COMMON, "--layers", 8, 8), ["add up to 32"]),
        ((*WLB, *COMMON, "--cost-model", "no/such.json"), ["no/such.json", "No such file"]),
        ((*WLB, *MACHINE, "--pp", "auto"), ["argument --pp: 'auto' is no longer searched", "tune"]),
        (("compare", "--lengths", "wlb", *COMMON, "--batches", "many"), ["--batches", "'many'"]),
        (("compare", "--lengths", "wlb", *COMMON, "--planner", "epp", "pakcing"), ["packing"]),
        (("plan", "--lenths", "wlb"), ["unknown option '--lenths'", "--lengths"]),
        (
            (*WLB, *COMMON, "--batch", 10**14),
            ["batch 100000000000000 of 512 documents: needs more than 4294967296 epochs"],
        ),
        (
            (*WLB, *COMMON, "--global-batch-size", 10**8),
            ["--global-batch-size", "whole number of at most 32768"],
        ),
        (("check", "no.plan"), ["no.plan", "No such file", "plan ... -o FILE` writes one"]),
        (("check", "no.plan", "--width", 80), ["unknown option '--width'"]),
        (("draw", "no.plan", "--width", 10**6), ["whole number of at most 100000"]),
        (("draw", "no.plan", "--width", "9" * 5000), ["whole number of at most 100000"]),
        (("check",), ["PLAN"]),
        ((*WLB, "--pp", 2), ["--model is missing"]),
        ((*WLB, *COMMON, "--no-kv-read"), ["--kv-read was removed; costs are those of training"]),
        (("serve", "--pp", 2), ["serve was removed; training starts its planner processes itself"]),
        (("chck",), ["unknown command 'chck'; did you mean check?"]),
        (("--help-me",), ["--help-me"]),
        ((), ["no command; expected one of plan, compare"]),
    ],
)
def test_bad_options(capsys, arguments, words):
    line = refused(capsys, *arguments)
    for word in words:
        assert word in line


def test_bad_plans(capsys, tmp_path, plan):
    path = tmp_path / "bad.plan"
    for change, words in (
        (lambda text: "", ["plan v1"]),
        (lambda text: text.replace("F0 F1 F2 B1 B0 B2", "F0 F1 F2 B0 B1 B2"), ["lacks B1"]),
        (lambda text: text.replace("chunk 2: 2[0:900]", "chunk 2: 2[0:800]"), ["[800:900]"]),
        (lambda text: text.replace("layers 16 16", "layers 16 x"), ["line 3", "'x'"]),
    ):
        path.write_text(change(PLAN))
        for command in ("check", "draw"):
            line = refused(capsys, command, path)
            for word in words:
                assert word in line
        refused(capsys, "simulate", path, *MACHINE)
    path.write_bytes(b"\xff\xfe\x00plan")
    assert "is not UTF-8 text" in refused(capsys, "check", path)
    (tmp_path / "d.svg").mkdir()
    assert "is a folder" in refused(capsys, "draw", plan, "-o", tmp_path / "d.svg")
    assert "unknown ending '.gif'" in refused(capsys, "draw", plan, "-o", tmp_path / "x.gif")
    assert "cannot write" in refused(capsys, "draw", plan, "-o", tmp_path / "no" / "x.svg")


def test_a_plan_over_the_budget_is_found(capsys, plan):
    line = refused(capsys, "check", plan, *MACHINE, "--memory-budget-gib", 9)
    assert "holds" in line and "the budget is 9.000 GiB" in line
    shown = printed(capsys, "simulate", plan, *MACHINE, "--memory-budget-gib", 9)
    assert "OVER THE BUDGET" in shown.out


def test_bad_records(capsys, plan, tmp_path):
    path = tmp_path / "bad.timed"
    for text, words in (
        ("", "expected the line 'timed v1'"),
        ("timed v1\n", "holds no record"),
        ("timed v1\n0 F0 x 1.0 5\n", "is not a timed record"),
        ("timed v1\n7 F0 0.0 1.0 5\n", "the plan has 2 stages"),
        ("timed v1\n0 W0 0.0 1.0 5\n", "does not hold"),
        ("timed v1\n0 F0 0.0 1.0 5\n", "stage 0 ran nothing as op 2"),
        ("timed v1\n0 F1 0.0 1.0 5\n0 F0 1.0 2.0 5\n", "stage 0 ran F1 as op 1"),
    ):
        path.write_text(text)
        assert words in refused(capsys, "draw", plan, "--records", path)


def test_a_deadlock_is_drawn_beside_its_line(capsys, tmp_path):
    path = tmp_path / "stuck.plan"
    path.write_text(
        PLAN.replace("F0 F1 B1 B0 F2 B2", "F2 F0 F1 B1 B0 B2")
        .replace("F0 F1 F2", "F0 F1", 1)
        .replace("B1 B0 B2\n", "B1 B0 F2 B2\n", 1)
    )
    assert main(["check", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "lacks" in shown.err
    grid = shown.out.splitlines()
    assert grid[0].startswith("  step:") and grid[1].startswith("  stage 0: ")
    assert ">F2" in grid[2] and grid[2].endswith("<- lacks F2 of stage 0")
    assert main(["check", str(path), "--json"]) == 2
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------ processes


def run(*arguments, stdin=None, code=None):
    """In a process of its own: ``code`` runs first."""
    program = ["-m", "megatron_epp"]
    if code is not None:
        start = "import sys; from megatron_epp.__main__ import main; sys.exit(main())"
        program = ["-c", f"{code}\n{start}"]
    return python(*program, *arguments, stdin=stdin)


def test_it_answers_where_torch_is_not_installed(tmp_path, lengths):
    code = "import sys\nfor name in ('torch', 'megatron', 'triton'): sys.modules[name] = None"
    path = tmp_path / "x.plan"
    found = run("plan", "--lengths", lengths, "--pp", 2, *MACHINE, "-o", path, code=code)
    assert found.returncode == 0, found.stderr
    for arguments in (
        ("check", path),
        ("simulate", path, *MACHINE),
        ("draw", path, "-o", tmp_path / "x.html"),
        ("draw", path, "-o", tmp_path / "x.png"),
    ):
        found = run(*arguments, code=code)
        assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", DOING)
def test_commands_that_need_torch_say_so(monkeypatch, capsys, command):
    monkeypatch.setitem(sys.modules, f"megatron_epp.mcore.{DOING[command]}", None)
    assert "is not installed" in refused(capsys, command)


def test_commands_that_need_a_compiler_say_so(monkeypatch, capsys, plan):
    monkeypatch.delitem(sys.modules, "megatron_epp.cli.draw", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_epp.show.paint", None)
    assert "is not installed" in refused(capsys, "draw", plan)


def shell(line: str) -> programs.Done:
    return programs.run(programs.BASH, "-c", line)


def test_a_closed_pipe_is_no_error(plan):
    reader = (
        f"{sys.executable} -m megatron_epp draw {plan} --width 4000 | true; echo ${{PIPESTATUS[0]}}"
    )
    found = shell(reader)
    assert found.returncode == 0 and found.stdout.strip() == "0" and found.stderr == ""


def test_what_is_no_plain_file_is_written_into(capsys, lengths, tmp_path):
    """A device, a pipe: it must stay what it was."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        printed(capsys, "plan", "--lengths", lengths, *MACHINE, "--pp", 2, "-o", pipe)
        assert Plan.parse(reader.communicate()[0]).documents == LENGTHS
    assert pipe.is_fifo()
    (link := tmp_path / "link").symlink_to(tmp_path / "far.plan")
    printed(capsys, "plan", "--lengths", lengths, *MACHINE, "--pp", 2, "-o", link)
    assert link.is_symlink() and Plan.parse((tmp_path / "far.plan").read_text())


def test_options_of_a_machine_need_one(capsys, plan):
    for words in (["--layers", 16, 15], ["--memory-budget-gib", 1], ["--topology", "flat"]):
        for command in ("check", "draw"):
            told = refused(capsys, command, plan, *words)
            assert f"{words[0]} has no effect without a machine" in told


def test_degrees_divide_the_heads(capsys, lengths):
    told = refused(capsys, "plan", "--lengths", lengths, *MACHINE, "--pp", 2, "--tp", 3)
    assert "--tp 3 --cp 8: their product must divide the 32 attention heads of gpt-7b" in told


def test_a_budget_of_a_cpu_covers_no_weights(capsys, plan, lengths):
    """As in training, so that pictures and plans tell of the same bytes. The weights alone are
    beyond this budget."""
    machine = ["--model", "gpt-7b", "--device", "cpu", "--memory-budget-gib", 10]
    facts = json.loads(printed(capsys, "simulate", plan, *machine, "--json").out)
    assert facts["states_bytes"] == [0.0, 0.0]
    words = ["--pp", 2, "--planner", "packing", "--json"]
    assert json.loads(printed(capsys, "plan", "--lengths", lengths, *machine, *words).out)["fits"]
    told = refused(capsys, "simulate", plan, *machine[:3], "a100-80g", *machine[4:])
    assert "memory budget 10 GiB: stage 0 needs more than" in told


@pytest.mark.parametrize("field", ["name", "group_bytes_per_second", "linear_flops"])
def test_a_device_file_of_odd_values(capsys, plan, tmp_path, field):
    path = tmp_path / "device.json"
    for odd in (-1, None, [], 10**400, True):
        described = dataclasses.asdict(DEVICES["h100-80g"]) | {field: odd}
        path.write_text(json.dumps(described))
        told = refused(capsys, "simulate", plan, "--model", "gpt-7b", "--device", path)
        assert f"device file {path}: " in told and "expected" in told


# ------------------------------------------------------------------ hostile files and numbers


def test_no_file_is_read_without_end(capsys, plan, tmp_path):
    for command in (["check"], ["draw"], ["simulate", *MACHINE]):
        told = refused(capsys, command[0], "/dev/zero", *command[1:])
        assert "plan /dev/zero: longer than 256 MiB" in told
    for flag in ("--model", "--device", "--cost-model"):
        words = {"--model": "gpt-7b", "--device": "a100-80g", flag: "/dev/zero"}
        told = refused(capsys, "plan", "--lengths", "wlb", "--pp", 2, *sum(words.items(), ()))
        assert "/dev/zero: longer than 16 MiB" in told
    assert "/dev/zero" in refused(capsys, "draw", plan, "--records", "/dev/zero")
    with gzip.open(bomb := tmp_path / "bomb.gz", "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(b"1\n" * (1 << 20))  # 200 MiB, a hundred million lengths
    for endless in ("/dev/zero", bomb):
        assert str(endless) in refused(capsys, "plan", "--lengths", endless, *COMMON)


def test_nobody_is_waited_for_at_a_pipe(capsys, plan, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe.json")
    for command in (["check"], ["draw"], ["simulate", *MACHINE]):
        told = refused(capsys, command[0], pipe, *command[1:])
        assert f"plan {pipe}: is a pipe; expected a plan file in a regular file" in told
    words = ["--lengths", "wlb", "--pp", 2, "--model", "gpt-7b", "--cost-model", pipe]
    assert f"profile file {pipe}: is a pipe; expected" in refused(capsys, "plan", *words)
    # One that a shell makes has somebody who writes.
    done = shell(f"{sys.executable} -m megatron_epp check <(cat {plan})")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2147483648\n", "at most 2147483647"),
        ("2147483647\n" * 3, "6442450941 inputs in 3 documents; expected at most 4294967296"),
    ],
)
def test_a_batch_beyond_64_bits_is_refused(capsys, tmp_path, text, words):
    path = tmp_path / "large.txt"
    path.write_text(text)
    assert words in refused(capsys, "plan", "--lengths", path, *COMMON)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--multiple", 999999999999999], "whole number of at most 1048576"),
        (["--memory-budget-gib", "1e300"], "expected a number from 1e-06 to 1e+06, in GiB"),
        (
            ["--devices", 4],
            "--devices was removed; give --pp and --cp; tune --gpus N",
        ),
        (["--effort", 10**12], "whole number of at most 1000000"),
    ],
)
def test_numbers_that_no_machine_has(capsys, lengths, words, told):
    assert told in refused(capsys, "plan", "--lengths", lengths, *COMMON, *words)


def test_words_of_numpy_become_one_line(capsys, lengths, monkeypatch):
    """Whatever bound is missing: no warning of numpy's reaches the user."""
    import numpy as np

    from megatron_epp.cli import plan as command

    def overflowing(*_):
        return np.array([1e308]) * 1e308

    monkeypatch.setattr(command, "open_batches", overflowing)
    told = refused(capsys, "plan", "--lengths", lengths, *COMMON)
    assert "too large or too small together" in told and "overflow encountered" in told


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(capsys, plan, tmp_path):
    """The names of old, and any other: files are made anew, under names that nobody knows."""
    victim, out = tmp_path / "victim", tmp_path / "o.txt"
    victim.write_text("mine")
    for name in (".o.txt.partial", "o.txt.partial"):
        (tmp_path / name).symlink_to(victim)
    printed(capsys, "draw", plan, "-o", out)
    assert victim.read_text() == "mine" and out.is_file() and not out.is_symlink()
    before = {path.name for path in tmp_path.iterdir()}
    out.chmod(0o640)
    printed(capsys, "draw", plan, "-o", out)  # an old file keeps its rights
    assert out.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_partial_file_goes_when_it_cannot_be_finished(capsys, plan, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    told = refused(capsys, "draw", plan, "-o", tmp_path / "o.txt")
    assert "No space left on device" in told
    assert [path.name for path in tmp_path.iterdir()] == ["a.plan"]


@pytest.mark.parametrize("ending", ["svg", "html", "txt"])
def test_a_title_of_control_characters(capsys, plan, tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    printed(capsys, "draw", plan, "--title", "a\x01b\x1b[31m", "-o", path)
    text = path.read_text()
    assert "\x01" not in text and "\x1b" not in text and "\\u0001" not in text


def test_check_is_linear_in_stages(monkeypatch):
    """Counted, not timed: an op is looked at a bounded number of times."""
    from tests.show.plans import one_f_one_b

    module = importlib.import_module("megatron_epp.ir.check")
    looked_at = 0
    lacking = module._lacking

    def counted(*arguments):
        nonlocal looked_at
        looked_at += 1
        return lacking(*arguments)

    monkeypatch.setattr(module, "_lacking", counted)
    for stages in (20, 80):
        plan, looked_at = one_f_one_b(stages, 6), 0
        check(plan)
        assert looked_at <= 3 * sum(map(len, plan.orders))


@pytest.mark.parametrize("command", DOING)
def test_a_wrong_flag_is_refused_before_torch_is_loaded(command):
    pytest.importorskip("megatron.core")
    code = "import sys\nsys.modules['torch'] = None"
    for flag, near in (("--foo", "see megatron_epp"), ("--hiden-size", "did you mean --hidden-s")):
        found = run(command, "--num-layers", 4, flag, 64, code=code)
        assert found.returncode == 2
        assert f"{command}: unknown option '{flag}', here and in Megatron; {near}" in found.stderr
    # What is known passes, and meets the next refusal.
    found = run(command, "--num-layers", 4, "--no-rope-fusion", code=code)
    assert found.returncode == 2 and "unknown option" not in found.stderr


def test_main_imports_no_solver(plan):
    """check answers at once: neither solver nor compiler is loaded for it."""
    code = "import sys\nfor name in ('numba', 'highspy', 'matplotlib'): sys.modules[name] = None"
    found = run("check", plan, code=code)
    assert found.returncode == 0, found.stderr
