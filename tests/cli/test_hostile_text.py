"""Names and texts from files: none becomes a command, a control sequence or a megabyte of line."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.ir import Op, Plan, PlanError, Span, StageOp, Step, Timed, parse_records
from megatron_epp.ir.errors import for_terminal, quoted, shortened
from megatron_epp.ir.placement import placement_of_file
from tests.cli.commands import printed, refused

pytestmark = pytest.mark.everything

LENGTHS = (8000, 6000, 3000, 2500, 1500, 900, 500, 300)
MACHINE = ("--model", "gpt-7b", "--device", "a100-80g", "--pp", 2)
PLAN = """\
plan v1
documents 8 4
layers 16 16
chunk 0: 0[0:8]
chunk 1: 1[0:4]
stage 0: F0 F1 B0 B1
stage 1: F0 B0 F1 B1
"""
ESCAPE = "\x1b]0;pwned\x07\x1b[2J"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "a.plan"
    path.write_text(PLAN)
    return path


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name", ["nice\ntouch PWNED #", f"nice{ESCAPE}", "nice\u202ecod", "x" * 201]
)
@pytest.mark.parametrize("what", ["model", "device", "topology"])
def test_a_name_is_one_printable_line(capsys, tmp_path, lengths, what, name):
    described = {
        "model": dataclasses.asdict(MODELS["gpt-7b"]),
        "device": dataclasses.asdict(DEVICES["a100-80g"]),
        "topology": {},
    }[what]
    file = tmp_path / "m.json"
    file.write_text(json.dumps(described | {"name": name}))
    words = {"--model": "gpt-7b", "--device": "a100-80g", f"--{what}": file}
    told = refused(capsys, "plan", "--lengths", lengths, "--pp", 2, *sum(words.items(), ()))
    expected = "at most 200 characters" if len(name) > 200 else "one line of printable characters"
    assert f"{what} file {file}: {what} name 'nice" in told or len(name) > 200
    assert f"expected {expected}" in told


def test_the_name_of_a_file_is_no_command_of_the_launch_script(
    capsys, tmp_path, lengths, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    device = tmp_path / "d\ntouch PWNED #.json"
    device.write_text(json.dumps(dataclasses.asdict(DEVICES["h100-80g"])))
    script = tmp_path / "run\ntouch PWNED #.sh"
    words = ["--model", "llama3-8b", "--device", device, "--nodes", 1, "--effort", 0]
    words += ["--global-batch-size", 8, "--batches", 1, "--top", 1, "--tp", 4, "--pp", 2]
    printed(capsys, "tune", "--lengths", lengths, *words, "--script", script)
    text = script.read_text()
    assert not [line for line in text.split("\n") if line.startswith("touch")]
    assert text.isprintable() or {c for c in text if not c.isprintable()} == {"\n"}
    subprocess.run(
        ["bash", str(script)], check=True, capture_output=True,
        env={**os.environ, "PYTHON": "echo", "DATA": "corpus", "TOKENIZER": "t.model"},
    )  # fmt: skip
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("command", ["simulate", "draw"])
def test_a_plans_comment_does_not_reach_the_terminal(capsys, plan, command):
    plan.write_text(f"# made for: --model gpt-7b --device a100-80g --cost-model '{ESCAPE}'\n{PLAN}")
    machine = MACHINE[:4] if command == "simulate" else ()
    shown = printed(capsys, command, plan, *machine)
    assert "its comment 'made for' is ignored" in shown.err
    assert "\x1b" not in shown.out + shown.err and "\x07" not in shown.out + shown.err


def test_a_profiles_texts_and_fields_do_not_reach_the_terminal(capsys, plan, tmp_path):
    figures = json.loads(profile(MODELS["gpt-7b"], DEVICES["a100-80g"]).to_json())
    file = tmp_path / "p.json"
    words = ("simulate", plan, "--cost-model", file, "--memory-budget-gib", 60)
    for field in ("model", "device", "source"):
        changed = figures["provenance"] | {field: f"x{ESCAPE}"}
        file.write_text(json.dumps(figures | {"provenance": changed}))
        told = refused(capsys, *words)
        assert f"provenance: {field} 'x\\x1b]0;pwned" in told and "\x1b" not in told
    file.write_text(json.dumps(figures | {ESCAPE: 1}))
    told = refused(capsys, *words)
    assert "unknown '\\x1b]0;pwned" in told and "\x1b" not in told


def test_a_line_of_an_error_is_printable_whatever_it_quotes(capsys, tmp_path):
    told = refused(capsys, "check", tmp_path / f"no{ESCAPE}such.plan")
    assert "\x1b" not in told and "no\\x1b]0;pwned" in told
    assert for_terminal("a\x1bb\nc\rd") == "a\\x1bb\nc\\rd"


# ------------------------------------------------------------------ long words

LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "parse",
    [
        Span.parse,
        Op.parse,
        StageOp.parse,
        Timed.parse,
        Plan.parse,
        Step.parse,
        lambda text: Timed.parse(f"0 {text} 0.0 1.0 0"),
        lambda text: Plan.parse(PLAN.replace("0[0:8]", text)),
        lambda text: Plan.parse(PLAN.replace("documents 8 4", f"documents 8 {text}")),
        lambda text: Plan.parse(f"{PLAN}predicted seconds {text} peak_gib 1 1 planner epp"),
        lambda text: Plan.parse(f"{PLAN}predicted seconds 1 peak_gib 1 1 planner {text}"),
        lambda text: Plan.parse(PLAN.replace("stage 0:", f"recompute 0: {text} 16k\nstage 0:")),
        lambda text: Step.parse(f"step v1\ndeal {text}\n{PLAN}"),
        lambda text: Step.parse(f"step v1\nlockstep {text}\n{PLAN}"),
        lambda text: parse_records(text),
        lambda text: placement_of_file(f"place {text}", 2),
        lambda text: placement_of_file(text, 2),
    ],
)
def test_a_long_word_of_a_plan_is_quoted_in_short(parse):
    with pytest.raises(PlanError) as caught:
        parse(LONG)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("what", ["key", "pattern", "size", "name", "device"])
def test_a_long_word_of_a_description_is_quoted_in_short(capsys, tmp_path, lengths, what):
    shape = dataclasses.asdict(MODELS["gpt-7b"])
    changes = {"key": {LONG: 1}, "pattern": {"pattern": LONG}, "size": {"heads": LONG}}
    file = tmp_path / "m.json"
    file.write_text(json.dumps(shape | changes.get(what, {})))
    model, device = (LONG if what == "name" else file), (f"{LONG}*0" if what == "device" else "cpu")
    words = ("--lengths", lengths, "--pp", 2, "--model", model, "--device", device)
    assert len(refused(capsys, "plan", *words)) < 1000


def test_what_is_shortened_keeps_its_ends():
    assert quoted("abc") == "'abc'" and quoted([1, 2]) == "[1, 2]"
    assert quoted(LONG) == repr("x" * 57 + "...")
    assert shortened("a" * 50 + "b" * 50, 25) == "a" * 10 + " ... " + "b" * 10
    assert shortened("abc", 3) == "abc"


# ---------------------------------------------------------------- files without end, or slow ones


@pytest.mark.parametrize("flag", ["--placement"])
def test_a_placement_is_read_within_a_bound(capsys, tmp_path, lengths, flag):
    words = ("plan", "--lengths", lengths, *MACHINE)
    os.mkfifo(pipe := tmp_path / "pipe")
    assert "is a pipe; expected lines 'place' or" in refused(capsys, *words, flag, pipe)
    assert "longer than 16 MiB; expected lines" in refused(capsys, *words, flag, "/dev/zero")
    (text := tmp_path / "text").write_bytes(b"\xff")
    assert "is not UTF-8 text" in refused(capsys, *words, flag, text)
    assert f"{flag} {tmp_path / 'no'}: No such file" in refused(
        capsys, *words, flag, tmp_path / "no"
    )


@pytest.mark.parametrize("time", ["1e999", "9e999", "-1e999", "1e307", "1e10"])
@pytest.mark.parametrize("ending", ["svg", "html", "json", "txt", "png"])
def test_a_time_beyond_any_run_is_no_record(capsys, plan, tmp_path, time, ending):
    records = tmp_path / "r.timed"
    records.write_text(f"timed v1\n0 F0 0.0 1.0 0\n0 F1 1.0 {time} 0\n")
    words = ("draw", plan, "--records", records, "-o", tmp_path / f"x.{ending}")
    assert f"'0 F1 1.0 {time} 0' is not a timed record" in refused(capsys, *words)
    assert not (tmp_path / f"x.{ending}").exists()


@pytest.mark.parametrize("ending", ["svg", "html", "json", "txt", "png"])
def test_the_longest_time_of_a_record_is_drawn(capsys, plan, tmp_path, ending):
    records, drawn = tmp_path / "r.timed", tmp_path / f"x.{ending}"
    ops = "".join(f"{s} {op} 0.0 1e9 0\n" for s in (0, 1) for op in ("F0", "F1", "B0", "B1"))
    records.write_text(f"timed v1\n{ops}")
    plan.write_text(PLAN.replace("F0 B0 F1 B1", "F0 F1 B0 B1"))
    printed(capsys, "draw", plan, "--records", records, "-o", drawn)
    if ending in ("html", "json"):
        assert not {"NaN", "Infinity"} & set(re.findall(r"NaN|Infinity", drawn.read_text()))


def test_more_lines_than_a_plan_has_are_refused_at_once(tmp_path, capsys):
    for text in ("a\n" * 3_000_000, "\n" * 3_000_000):
        with pytest.raises(PlanError, match="3000001 lines; expected at most 2000000 of a plan"):
            Step.parse(f"plan v1\n{text}")
    with pytest.raises(PlanError, match="11000001 lines; expected at most"):
        parse_records("timed v1\n" + "\n" * 11_000_000)


def test_lines_are_read_one_by_one():
    """Not all of them as words before the second one is looked at."""
    looked_at = 0

    def lines():
        nonlocal looked_at
        for number, line in enumerate(["plan v1", *["a"] * 1000], 1):
            looked_at = number
            yield number, line

    with pytest.raises(PlanError, match=r"plan line 2 \('a'\): expected 'documents'"):
        Plan.of_lines(lines())
    assert looked_at <= 3


def test_a_step_is_split_into_plans_once(monkeypatch):
    """Not the whole text once more for each plan."""
    read = 0
    of_lines = Plan.of_lines

    def counted(lines):
        nonlocal read
        every = list(lines)
        read += len(every)
        return of_lines(every)

    replicas = 50
    one = "plan v1\nreplica {} of 50\ndocuments 1\nlayers 1\nchunk 0: 0[0:1]\nstage 0: F0 B0\n"
    deals = "".join(f"deal {n}: {n}\n" for n in range(replicas))
    text = f"step v1\n{deals}{''.join(one.format(n) for n in range(replicas))}"
    monkeypatch.setattr(Plan, "of_lines", counted)
    assert str(Step.parse(text)) == str(Step.parse(str(Step.parse(text))))
    assert read <= 3 * (len(text.split("\n")) + 3 * replicas)
    broken = text.replace("replica 49 of 50\n", "replica 49 of\n")
    line = broken.split("\n").index("replica 49 of") + 1
    with pytest.raises(PlanError, match=rf"plan line {line} \('replica 49 of'\)"):
        Step.parse(broken)


def test_choices_are_counted_before_they_are_read():
    with pytest.raises(PlanError, match=r"plan line 6 .*: 3 choices for 2 chunks"):
        Plan.parse(PLAN.replace("stage 0:", "recompute 0: 16k 16k nonsense\nstage 0:"))
    chunks = 1100
    kinds = " ".join(f"{9999 - n}k{n}f" for n in range(1, chunks + 1))
    spans = "".join(f"chunk {n}: 0[{n}:{n + 1}]\n" for n in range(chunks))
    head = f"plan v1\ndocuments {chunks}\nlayers 9999\n{spans}recompute 0: {kinds}\n"
    with pytest.raises(
        PlanError, match="more than 10000000 layers in recompute choices that differ"
    ):
        Plan.parse(f"{head}stage 0: F0\n")


@pytest.mark.parametrize(("documents", "runs"), [(1000, True), (1500, False)])
def test_documents_continue_each_other_within_a_bound(documents, runs):
    text = f"plan v1\ndocuments {' '.join('1' * documents)}\n"
    text += "".join(f"prefix {n}: {n - 1}[0:1]\n" for n in range(1, documents))
    text += "layers 1\n" + "".join(f"chunk {n}: {n}[0:1]\n" for n in range(documents))
    text += "stage 0: F0\n"
    if runs:
        assert Plan.parse(text).offset(documents - 1) == documents - 1
    else:
        with pytest.raises(PlanError, match="continue others 1124250 times in all"):
            Plan.parse(text)


def test_lists_of_lengths_have_a_bound_on_lines_and_members(capsys, tmp_path):
    words = ("plan", *MACHINE, "--lengths")
    (many := tmp_path / "many.txt").write_text("1\n" * 5_000_001)
    assert "has 5000001 lines; expected at most 5000000" in refused(capsys, *words, many)
    (members := tmp_path / "members.gz").write_bytes(gzip.compress(b"") * 10_001)
    assert "10001 gzip files in one" in refused(capsys, *words, members)
    members.write_bytes(gzip.compress(b"100\n200\n") * 3)
    assert "documents" in printed(capsys, *words, members).out


def test_batches_are_bounded(capsys, lengths):
    words = ("compare", "--lengths", lengths, *MACHINE, "--batches")
    told = refused(capsys, *words, 999999999999999)
    assert "--batches: '999999999999999': expected a whole number of at most 100000" in told
