"""``plan``, ``compare``, ``simulate``, ``draw`` and ``check`` end to end, in this process."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.cli.options import DOING
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.accuracy import accuracy_lines
from megatron_epp.ir import Plan, Step, check, parse_records
from megatron_epp.show.units import GIB
from tests import programs
from tests.cli.commands import GPT, LENGTHS, MACHINE, PLAN, Commands
from tests.corpus.test_idx_file import write_pair
from tests.show.plans import one_f_one_b

ON_TWO = f"plan --lengths lengths --pp 2 --placement even {GPT}"
FAST = f"plan --lengths pair --pp 2 --placement even --effort 0 {GPT}"
ENDINGS = {
    "svg": b"<svg ",
    "png": b"\x89PNG",
    "html": b"<!doctype html>",
    "txt": b"a.plan",
    "json": b'{"displayTimeUnit"',
}


# ------------------------------------------------------------------ plan, and what reads plans


def test_a_plan_is_made_checked_played_and_drawn(cli: Commands) -> None:
    shown = cli.ran(ON_TWO)
    made = Plan.parse(shown.out)
    check(made)
    assert made.documents == LENGTHS  # all of the file, in its order
    assert "lower bound" in shown.err and "gap" in shown.err
    assert "\nhow         chunks of about 1/" in shown.err
    promised = cli.facts(f"{ON_TWO} -o x.plan")
    written = Path("x.plan").read_text()
    assert written == f"# made for: {MACHINE} --multiple 32 --zero 3\n{promised['plan']}"
    assert str(made) == str(Plan.parse(written)) == promised["plan"]
    assert "ok: 7 documents" in cli.said("check x.plan")
    assert cli.said(f"check x.plan {GPT}").startswith("ok: ")

    played = cli.facts(f"simulate x.plan {GPT} -o x.timed")
    for name in ("seconds", "bubble_ratio", "recompute_ratio", "comm_ratio", "gap"):
        assert played[name] == pytest.approx(promised[name], rel=1e-9, abs=1e-12)
    assert played["peak_bytes"] == promised["peak_bytes"]
    assert played["fits"] is promised["fits"] is True
    assert max(r.stop for r in parse_records(Path("x.timed").read_text())) == played["seconds"]
    text = cli.said(f"simulate x.plan {GPT}")
    assert "critical path" in text and "waits for" in text and "peak GiB" in text

    def runs(machine: str) -> list:
        cli.said(f"draw x.plan {machine} --records x.timed -o x.html")
        data = Path("x.html").read_text().split('id="data">')[1].split("</script>")[0]
        return json.loads(data)["runs"]

    predicted, measured = runs(GPT)
    assert predicted["title"].endswith("predicted") and measured["title"].endswith("measured")
    assert predicted["seconds"] == measured["seconds"]
    Path("x.plan").write_text(promised["plan"])  # without its machine
    assert len(runs("")) == 1


def test_every_format_of_a_picture(cli: Commands, folder: Path) -> None:
    text = cli.said("draw a.plan")
    assert "stage 0 |F0" in text and "12 units" in text
    assert "ms" in cli.said(f"draw a.plan {GPT}")
    for ending, beginning in ENDINGS.items():
        for machine in ("", GPT):
            cli.said(f"draw a.plan -o x.{ending} {machine}")
            assert Path(f"x.{ending}").read_bytes().startswith(beginning)
    for ending in ("svg", "html", "txt"):
        cli.said(f"draw a.plan --title 'a\x01b\x1b[31m' -o x.{ending}")
        drawn = Path(f"x.{ending}").read_text()
        assert "\x01" not in drawn and "\x1b" not in drawn and "\\u0001" not in drawn
    assert [p.name for p in folder.iterdir() if "partial" in p.name] == []


@pytest.mark.everything
def test_plan_offloads_where_memory_is_tight(cli: Commands) -> None:
    """All levers do, those of training do not; a machine without a host link refuses the plan."""
    tight = f"{ON_TWO} --memory-budget-gib 10"

    def offloaded(line: str) -> tuple[str, list[str]]:
        """The recompute modes of the plan, and its line on offloading in words."""
        shown = cli.said(f"{line} -o x.plan").splitlines()
        plan = Plan.parse(Path("x.plan").read_text())
        modes = "".join(choice for stage in plan.recompute for choice in stage)
        told = next((line for line in shown if line.startswith("offloaded ")), "")
        assert ("o" in modes) == bool(told)
        return modes, told.replace(";", "").split()

    for levers in ("default", "all,-offload"):
        assert "o" not in offloaded(f"{tight} --levers {levers}")[0]
    _, little = offloaded(f"{tight} --host-memory-gib 1")  # by default
    assert max(float(word) for word in little if re.fullmatch(r"\d+\.\d\d", word)) <= 1
    share = offloaded(f"{tight} --levers all")[1][1]
    assert float(little[1].rstrip("%")) < float(share.rstrip("%")) < 100
    text = cli.said(f"simulate x.plan {GPT} --memory-budget-gib 10")
    assert f"offloaded   {share} of what layers save" in text
    assert f", offloaded {share}" in cli.said(f"draw x.plan {GPT}")
    assert "ok: 7 documents" in cli.said("check x.plan")
    for command in ("simulate", "draw", "check"):
        told = cli.refused(
            f"{command} x.plan --model gpt-7b --device cpu --cp 1 --memory-budget-gib 500"
        )
        assert "the cost model of cpu has no rate to the host's memory" in told


def test_overlong_documents_are_counted(cli: Commands) -> None:
    shown = cli.ran(f"{FAST} --context 1000 --overlong split")
    assert "1 split" in shown.err
    assert sorted(Plan.parse(shown.out).documents) == [900, 1000, 1000, 1000]


def test_an_index_gives_the_batches_of_training(cli: Commands, folder: Path) -> None:
    path = write_pair(folder / "corpus", [101, 1, 51, 2001, 31])
    common = f"{FAST} --lengths corpus.idx --context 1000"
    shown = cli.ran(common)
    assert sorted(Plan.parse(shown.out).documents) == [30, 50, 100, 1000]
    assert "1 of fewer than 2 tokens skipped; 1 truncated" in shown.err
    batches = [cli.said(f"{common} --global-batch-size 2 --batch {number}") for number in (0, 1)]
    drawn = [length for text in batches for length in Plan.parse(text).documents]
    assert sorted(drawn) == [30, 50, 100, 1000]  # an epoch
    path.write_bytes(path.read_bytes()[:-3])
    assert "corpus.idx: truncated: 139 bytes" in cli.refused(common)


def test_replicas_make_a_step(cli: Commands) -> None:
    cli.said(f"{ON_TWO} --effort 0 --dp 2 -o x.step")
    step = Step.parse(Path("x.step").read_text())
    assert len(step.plans) == 2 and sorted(step.lengths) == sorted(LENGTHS)
    assert cli.said("check x.step").count("ok: ") == 2
    assert "stage 1" in cli.said("draw x.step --replica 1")
    assert "--replica 2" in cli.refused("draw x.step --replica 2")


def test_the_same_inputs_give_the_same_plan(cli: Commands) -> None:
    common = f"{FAST} --lengths prolong --global-batch-size 24 --context 16384"
    first, again, *others = (
        cli.said(f"{common} {more}") for more in ("", "", "--batch 1", "--seed 1")
    )
    assert first == again and first not in others


def test_a_budget_of_a_cpu_covers_no_weights(cli: Commands) -> None:
    """As in training, so that pictures and plans tell of the same bytes. The weights alone are
    beyond this budget."""
    machine = "--model gpt-7b --memory-budget-gib 10 --device"
    assert cli.facts(f"simulate a.plan {machine} cpu")["states_bytes"] == [0.0, 0.0]
    assert cli.facts(f"{FAST} --cp 1 --planner packing {machine} cpu")["fits"]
    told = cli.refused(f"simulate a.plan {machine} a100-80g")
    assert "memory budget 10 GiB: stage 0 needs more than" in told


# ------------------------------------------------------------------ the machine in a plan's comment


def test_a_plan_brings_its_machine_and_named_options_stand_before_it(cli: Commands) -> None:
    budget = "--memory-budget-gib 60.5 --multiple 32 --zero 3 --topology flat"
    taken = f"{MACHINE} {budget}"
    cli.said(f"{FAST} {budget} --planner packing -o made.plan")
    assert Path("made.plan").read_text().startswith(f"# made for: {taken}\nplan v1\n")
    text = cli.said("simulate made.plan")
    assert text.startswith(f"machine     {taken} (the plan's own)\n")
    facts = cli.facts("simulate made.plan")
    assert facts["seconds"] == pytest.approx(facts["predicted_seconds"])
    assert cli.facts(f"simulate made.plan {taken}") == facts
    assert "units" not in cli.said("draw made.plan")
    text = cli.said("simulate made.plan --device h200-141g --cp 4")
    assert text.startswith(
        "machine     --model gpt-7b --memory-budget-gib 60.5 --zero 3 --topology flat (the plan's"
    )
    facts = cli.facts("simulate made.plan --memory-budget-gib 50")
    assert facts["budget_bytes"] == [50 * GIB] * 2


@pytest.mark.parametrize(
    ("comment", "reason"),
    [
        ("--model gpt-7b --device 'x", "No closing quotation"),
        ("--model gpt-7b --cp many", "--cp"),
        ("--model gpt-7b --device moved/device.json", "--device moved/device.json: no such file"),
        ("--model gpt-7b --shell rm", "unknown option '--shell'"),
        ("--model gpt-7b --cost-model '\x1b]0;pwned\x07'", "expected one line of printable"),
    ],
)
def test_a_comment_that_cannot_be_used_is_ignored_with_a_line(cli, comment, reason) -> None:
    Path("a.plan").write_text(f"# mine\n# made for: {comment}\n{PLAN}")
    shown = cli.ran("draw a.plan")
    assert "units" in shown.out
    assert shown.err.startswith("a.plan: its comment 'made for' is ignored: ")
    assert reason in shown.err and shown.err.count("\n") == 1
    assert "\x1b" not in shown.out + shown.err and "\x07" not in shown.out + shown.err
    # After the plan's first line it is a comment like any other.
    Path("a.plan").write_text(PLAN + f"# made for: {comment}\n")
    assert cli.ran("draw a.plan").err == ""


# ------------------------------------------------------------------ compare

FIELDS = {
    **dict.fromkeys(("batch", "chunks", "pipelines"), int),
    **dict.fromkeys(("levers", "peak_bytes"), list),
    **dict.fromkeys(("seconds", "lower_bound_seconds", "gap", "plan_seconds"), float),
    **dict.fromkeys(("bubble_ratio", "recompute_ratio", "comm_ratio"), float),
    "planner": str,
    "fits": bool,
}


def test_compare_lists_what_it_promises(cli: Commands) -> None:
    common = (
        "--lengths wikipedia --context 8192 --global-batch-size 24 --pp 2 --batches 2 --effort 0"
    )
    found = cli.facts(f"compare {common} {GPT}")
    for each in found:
        assert {name: type(each[name]) for name in FIELDS} == FIELDS
        assert each["seconds"] >= each["lower_bound_seconds"] > 0
        assert ("stock" in each) == (each["planner"] == "stock")
        assert each["gap"] == pytest.approx(1 - each["lower_bound_seconds"] / each["seconds"])
    assert {each["batch"] for each in found} == {0, 1}
    planners = {each["planner"] for each in found}
    assert {"epp", "packing"} <= planners
    for batch in (0, 1):
        mine = {e["planner"]: e["seconds"] for e in found if e["batch"] == batch and e["fits"]}
        mine.pop("stock", None)  # on another placement
        assert len({e["planner"] for e in found if e["batch"] == batch}) == len(planners)
        pipelines = {p: s for p, s in mine.items() if p not in ("flexsp", "megatron-hybrid-cp")}
        assert mine["epp"] <= min(pipelines.values()) * (1 + 1e-9)


def test_compare_begins_with_what_matters_and_explains_its_columns(cli: Commands) -> None:
    common = "--lengths wlb --context 32768 --global-batch-size 24 --pp 4 --batches 2 --effort 0"
    planners = "epp stock infinipipe seq1f1b 1f1b packing chunkflow slimpipe"
    text = cli.said(f"compare {common} {MACHINE} --planner {planners}")
    first = " ".join(text.split("\n\n")[0].split())
    assert re.fullmatch(
        r"Verdict: (use --epp|leave --epp out|either)[,;] .*\(.*, packed to .*\).*\. "
        r"Best: (epp|stock), \S+ m?s a batch, \d\.\d\d times as fast as (epp|stock) and "
        r"\d\.\d\d times as fast as infinipipe; it fits the memory budget on every batch\.",
        first,
    )
    assert max(map(len, text.splitlines())) <= 100
    header, _, rows = text.partition("planner  ")[2].partition("\n")
    for column in re.split(" {2,}", header.strip()):
        assert re.search(rf"^{column}  +\w", text, re.M), column
    table = {row.split()[0]: row.split() for row in rows.splitlines()[1:9]}
    assert float(table["stock"][3]) > 0 and first.count(" packed to ") == 1
    assert "offload" not in text  # not what training does by default


def test_compare_says_that_nothing_fits_and_where_epp_does_not_pay(cli: Commands) -> None:
    Path("long").write_text("98304\n" * 8)
    line = f"compare --lengths long --pp 2 {GPT} --memory-budget-gib 20 --planner chunkflow"
    text = cli.said(line)
    assert text.startswith("Best: none; no planner keeps every batch within the memory budget.")
    assert "0/1" in text
    text = cli.said(f"{line} flexsp infinipipe")
    assert " ".join(text.split("\n\n")[0].split()).endswith(
        " times as fast as infinipipe; it fits the memory budget on the batch. Training runs "
        "pipeline plans, which flexsp does not make."
    )
    Path("one").write_text("64\n")  # on one stage: nothing to cut or to balance
    job = f"compare --lengths one --pp 1 {MACHINE} --planner epp stock"
    text = cli.said(job)
    assert text.startswith("Verdict: either; --epp and stock (no pipeline, packed to 64 tokens")
    text = cli.said(f"{job} --zero 3")  # which no training with --epp runs
    assert text.startswith("Verdict: none, because --epp trains with ZeRO 1 only.")
    assert text.count("Verdict") == 1 and ": use --epp" not in text and "Best: " not in text


def test_replicas_that_share_experts_plan_nothing_that_training_refuses(cli: Commands) -> None:
    machine = "--model qwen3-30b-a3b --device h100-80g --pp 2 --dp 4 --ep 4 --vocab-parallel on"
    for command in ("plan", "compare"):
        told = cli.refused(f"{command} --lengths wlb {machine}")
        assert "--vocab-parallel on: as in training, not with replicas that share" in told


# ------------------------------------------------------------------ check


def test_bad_plans(cli: Commands) -> None:
    for old, new, told in (
        (PLAN, "", "plan v1"),
        ("F0 F1 F2 B1 B0 B2", "F0 F1 F2 B0 B1 B2", "lacks B1"),
        ("chunk 2: 2[0:900]", "chunk 2: 2[0:800]", "[800:900]"),
        ("layers 16 16", "layers 16 x", "line 3 ('layers 16 x')"),
    ):
        Path("bad.plan").write_text(PLAN.replace(old, new))
        for command in ("check bad.plan", "draw bad.plan", f"simulate bad.plan {GPT}"):
            assert told in cli.refused(command)
    line = cli.refused(f"check a.plan {GPT} --memory-budget-gib 9")
    assert "holds" in line and "the budget is 9.000 GiB" in line
    assert "OVER THE BUDGET" in cli.said(f"simulate a.plan {GPT} --memory-budget-gib 9")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected the line 'timed v1'"),
        ("timed v1\n", "holds no record"),
        ("timed v1\n0 F0 x 1.0 5\n", "is not a timed record"),
        ("timed v1\n0 F0 0.0 1e10 5\n", "is not a timed record"),  # beyond any run
        ("timed v1\n7 F0 0.0 1.0 5\n", "the plan has 2 stages"),
        ("timed v1\n0 F0 0.0 1.0 5\n", "stage 0 ran nothing as op 2"),
        ("timed v1\n0 F1 0.0 1.0 5\n0 F0 1.0 2.0 5\n", "stage 0 ran F1 as op 1"),
    ],
)
def test_bad_records(cli: Commands, text: str, told: str) -> None:
    Path("bad.timed").write_text(text)
    assert told in cli.refused("draw a.plan --records bad.timed -o x.svg")
    assert not Path("x.svg").exists()


def test_a_deadlock_is_drawn_next_to_its_line(cli: Commands) -> None:
    stuck = PLAN.replace("F0 F1 B1 B0 F2 B2", "F2 F0 F1 B1 B0 B2").replace("F0 F1 F2", "F0 F1", 1)
    Path("stuck.plan").write_text(stuck.replace("B1 B0 B2\n", "B1 B0 F2 B2\n", 1))
    shown = cli.ran("check stuck.plan", 2)
    assert shown.err.count("\n") == 1 and "lacks" in shown.err
    grid = shown.out.splitlines()
    assert grid[0].startswith("  step:") and grid[1].startswith("  stage 0: ")
    assert ">F2" in grid[2] and grid[2].endswith("<- lacks F2 of stage 0")
    assert cli.ran("check stuck.plan --json", 2).out == ""


def test_check_is_linear_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: an op is looked at a bounded number of times."""
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


# ------------------------------------------------------------------ processes


ROOT = str(programs.ROOT)
RECORDED = """\
# batch: from sample 0, seed 1234, context 8, overlong truncate, blend by documents
# corpus: sequences 0:1 of 1, 5 tokens, weight 1.0, corpus
plan v1
documents 4
layers 1
chunk 0: 0[0:4]
stage 0: F0 B0
"""


@pytest.mark.parametrize(
    ("without", "lines"),
    [
        (
            "torch megatron triton",
            [
                f"{FAST} -o x.plan",
                "simulate x.plan",
                "draw x.plan -o x.html",
                "draw x.plan -o x.png",
                "where w.step --chunk 0",
            ],
        ),
        ("torch numba highspy matplotlib", ["check a.plan"]),  # it answers at once
    ],
)
@pytest.mark.everything
def test_it_answers_where_packages_are_not_installed(without: str, lines: list[str]) -> None:
    write_pair(Path("corpus"), [5])
    Path("w.step").write_text(RECORDED)
    code = (
        f"import sys\nfor name in {without.split()}: sys.modules[name] = None\n"
        "from megatron_epp.__main__ import main\n"
        f"sys.exit(any([main(line.split()) for line in {lines}]))"
    )
    found = programs.python("-c", code, cwd=Path.cwd(), PYTHONPATH=ROOT)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", DOING)
def test_a_wrong_flag_is_refused_before_torch_is_loaded(command: str) -> None:
    pytest.importorskip("megatron.core")
    flags = ("--foo", "--hiden-size", "--no-rope-fusion")
    lines = [[command, "--num-layers", "4", flag, "64"] for flag in flags]
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom megatron_epp.__main__ import main\n"
        f"sys.exit(any([main(line) != 2 for line in {lines}]))"
    )
    found = programs.python("-c", code)
    assert found.returncode == 0
    unknown, misspelt, known = found.stderr.splitlines()
    assert "unknown option '--foo', here and in Megatron; see megatron_epp" in unknown
    assert "'--hiden-size', here and in Megatron; did you mean --hidden-s" in misspelt
    assert "unknown option" not in known  # it meets the next refusal


def shell(line: str) -> programs.Done:
    return programs.run(programs.BASH, "-c", line, cwd=Path.cwd(), PYTHONPATH=ROOT)


def test_pipes_that_end_early_and_pipes_of_a_shell() -> None:
    program = f"{sys.executable} -m megatron_epp"
    found = shell(f"{program} draw a.plan --width 4000 | true; echo ${{PIPESTATUS[0]}}")
    assert found.returncode == 0 and found.stdout.strip() == "0" and found.stderr == ""
    done = shell(f"{program} check <(cat a.plan)")
    assert done.returncode == 0, done.stderr


def test_what_is_no_plain_file_is_written_into(cli: Commands) -> None:
    """A device, a pipe, a link: it must stay what it was. A pipe in a folder is not read."""
    os.mkfifo("pipe")
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        cli.said(f"{FAST} -o pipe")
        assert Plan.parse(reader.communicate()[0]).documents == (3000, 900)
    assert Path("pipe").is_fifo()
    Path("link").symlink_to("far.plan")
    cli.said(f"{FAST} -o link")
    assert Path("link").is_symlink() and Plan.parse(Path("far.plan").read_text())
    assert "plan pipe: is a pipe; expected a plan file in" in cli.refused("check pipe")


# ------------------------------------------------------------------ how far the model is off


def test_reports_end_with_how_far_the_analytic_model_is_off(cli: Commands) -> None:
    analytic = named_cost("llama3-8b", "h100-80g", pp=2)
    line, *others = accuracy_lines(analytic)
    assert line.startswith("analytic model of h100-80g: median ") and not others
    assert " public measurements of dense models; " in line and " of MoE; " in line
    unscored = named_cost("llama3-8b", "a100-80g", pp=4)
    assert accuracy_lines(unscored) == [
        "analytic model of a100-80g: no public measurement scores it"
    ]
    its = analytic.layout.profile
    origin = dataclasses.replace(its.provenance, kind="measured")
    measured = dataclasses.replace(its, provenance=origin)
    assert accuracy_lines(analytic.replace(profile=measured)) == []
    job = "--lengths pair --effort 0 --model llama3-8b --device h100-80g --pp 2 --cp 4"
    assert cli.ran(f"plan {job}").err.splitlines()[-1] == line
    compare = f"compare {job} --planner packing 1f1b"
    assert cli.joined(compare).endswith(line)  # which is wrapped
    assert line in cli.joined(f"tune {job} --nodes 1 --tp 1")
    assert "analytic model of" not in json.dumps(cli.facts(compare))


@pytest.mark.everything
def test_how_tokens_go_to_experts_is_a_flag(cli: Commands) -> None:
    Path("same").write_text("8000\n" * 64)  # so many rows that exchanges count, not hosts
    job = (
        "--lengths same --global-batch-size 64 --effort 0 --placement even --vocab-parallel off "
        "--model qwen3-30b-a3b --device h100-80g --pp 2 --tp 2 --cp 4 --ep 8"
    )
    default, sorted_apart, flex = (
        cli.facts(f"plan {job} {more}")["seconds"]
        for more in ("", *(f"--moe-token-dispatcher-type {how}" for how in ("alltoall", "flex")))
    )
    assert default == sorted_apart > flex
