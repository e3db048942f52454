"""Names and texts from files: none becomes a command, a control sequence or a megabyte of line."""

import dataclasses
import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.ir import Plan, PlanError, Step, parse_records
from megatron_epp.ir.errors import for_terminal, quoted, shortened
from tests.cli.commands import GPT, Commands

pytestmark = pytest.mark.everything

MODEL = dataclasses.asdict(MODELS["gpt-7b"])
DEVICE = dataclasses.asdict(DEVICES["a100-80g"])
COSTS = json.loads(profile(MODELS["gpt-7b"], DEVICES["a100-80g"]).to_json())
ESCAPE = "\x1b]0;pwned\x07\x1b[2J"
LONG = "x" * 1_000_000
PLAN = """\
plan v1
documents 8 4
layers 16 16
chunk 0: 0[0:8]
chunk 1: 1[0:4]
stage 0: F0 F1 B0 B1
stage 1: F0 F1 B0 B1
"""


def of(**provenance: str) -> dict:
    """The cost model with another provenance."""
    return COSTS | {"provenance": COSTS["provenance"] | provenance}


@pytest.mark.parametrize(
    ("flag", "described", "told"),
    [
        ("model", MODEL | {"name": "nice\ntouch PWNED #"}, "model name 'nice"),
        ("device", DEVICE | {"name": f"nice{ESCAPE}"}, "device name 'nice"),
        ("device", DEVICE | {"name": None}, "device name None: expected"),
        ("topology", {"name": "nice\u202ecod"}, "topology name 'nice"),
        ("topology", {"name": "x" * 201}, "expected at most 200 characters"),
        ("model", MODEL | {LONG: 1}, ""),
        ("model", MODEL | {"pattern": LONG}, ""),
        ("model", MODEL | {"heads": LONG}, ""),
        ("cost-model", COSTS | {ESCAPE: 1}, "unknown '\\x1b]0;pwned"),
        ("cost-model", of(model=f"x{ESCAPE}"), "provenance: model 'x\\x1b]0;pwned"),
        ("cost-model", of(device=f"x{ESCAPE}"), "provenance: device 'x\\x1b]0;pwned"),
        ("cost-model", of(source=f"x{ESCAPE}"), "provenance: source 'x\\x1b]0;pwned"),
    ],
)
def test_texts_of_a_file_are_printable_and_quoted_in_short(cli, flag, described, told) -> None:
    Path("x.json").write_text(json.dumps(described))
    machine = "--model gpt-7b --device a100-80g"
    line = cli.refused(f"plan --lengths spread --pp 2 {machine} --{flag} x.json")
    assert told in line and line[:-1].isprintable() and len(line) < 1000


def test_words_of_the_command_line_are_quoted_too(cli: Commands) -> None:
    told = cli.refused(f"check 'no{ESCAPE}such.plan'")
    assert "\x1b" not in told and "no\\x1b]0;pwned" in told
    long = "x" * 10_000
    for word in (f"--model {long}", f"--device '{long}*0'"):
        assert len(cli.refused(f"plan --lengths spread --pp 2 --device cpu {word}")) < 1000
    assert for_terminal("a\x1bb\nc\rd") == "a\\x1bb\nc\\rd"
    assert quoted("abc") == "'abc'" and quoted([1, 2]) == "[1, 2]"
    assert quoted(LONG) == repr("x" * 57 + "...")
    assert shortened("a" * 50 + "b" * 50, 25) == "a" * 10 + " ... " + "b" * 10
    assert shortened("abc", 3) == "abc"


def test_the_name_of_a_file_is_no_command_of_the_launch_script(cli: Commands) -> None:
    device, script = Path("d\ntouch PWNED #.json"), Path("run\ntouch PWNED #.sh")
    device.write_text(json.dumps(DEVICE))
    cli.said(
        f"tune --lengths spread --model llama3-8b --device '{device}' --nodes 1 --effort 0 --top 1 "
        f"--global-batch-size 8 --batches 1 --tp 4 --pp 2 --script '{script}'"
    )
    text = script.read_text()
    assert not [line for line in text.split("\n") if line.startswith("touch")]
    assert {c for c in text if not c.isprintable()} <= {"\n"}
    subprocess.run(
        ["bash", str(script)], check=True, capture_output=True,
        env={**os.environ, "PYTHON": "echo", "DATA": "corpus", "TOKENIZER": "t.model"},
    )  # fmt: skip
    assert not Path("PWNED").exists()


# ---------------------------------------------------------------- texts without end, or slow ones


def test_the_longest_time_of_a_record_is_drawn(cli: Commands) -> None:
    ops = "".join(f"{s} {op} 0.0 1e9 0\n" for s in (0, 1) for op in ("F0", "F1", "B0", "B1"))
    Path("r.timed").write_text(f"timed v1\n{ops}")
    Path("a.plan").write_text(PLAN)
    for ending in ("svg", "png", "html", "txt", "json"):
        cli.said(f"draw a.plan --records r.timed -o x.{ending}")
    assert not re.findall(r"NaN|Infinity", Path("x.html").read_text() + Path("x.json").read_text())


STEP = "plan v1\nreplica {} of 50\ndocuments 1\nlayers 1\nchunk 0: 0[0:1]\nstage 0: F0 B0\n"


def step(replicas: int = 50) -> str:
    deals = "".join(f"deal {n}: {n}\n" for n in range(replicas))
    return f"step v1\n{deals}{''.join(map(STEP.format, range(replicas)))}"


def chain(documents: int) -> str:
    """A plan in which every document continues the one before."""
    prefixes = "".join(f"prefix {n}: {n - 1}[0:1]\n" for n in range(1, documents))
    chunks = "".join(f"chunk {n}: {n}[0:1]\n" for n in range(documents))
    lengths = " ".join("1" * documents)
    return f"plan v1\ndocuments {lengths}\n{prefixes}layers 1\n{chunks}stage 0: F0\n"


def mixed(chunks: int) -> str:
    """A plan of one stage whose chunks all recompute other layers."""
    spans = "".join(f"chunk {n}: 0[{n}:{n + 1}]\n" for n in range(chunks))
    kinds = " ".join(f"{9999 - n}k{n}f" for n in range(1, chunks + 1))
    head = f"plan v1\ndocuments {chunks}\nlayers 9999\n{spans}"
    return f"{head}recompute 0: {kinds}\nstage 0: F0\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (step().replace("replica 49 of 50", "replica 49 of"), "plan line 347 .*'replica 49 of'"),
        (PLAN.replace("stage 0:", "recompute 0: 16k 16k no\nstage 0:"), "3 choices for 2 chunks"),
        (mixed(1100), "more than 10000000 layers in recompute choices that differ"),
        (chain(1500), "continue others 1124250 times in all"),
    ],
    ids=["step", "choices", "mixed", "chain"],
)
def test_texts_of_plans_have_bounds(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Step.parse(text)


def test_more_lines_than_a_plan_has_are_refused_at_once() -> None:
    for text in ("a\n" * 3_000_000, "\n" * 3_000_000):
        with pytest.raises(PlanError, match="3000001 lines; expected at most 2000000 of a plan"):
            Step.parse(f"plan v1\n{text}")
    with pytest.raises(PlanError, match="11000001 lines; expected at most"):
        parse_records("timed v1\n" + "\n" * 11_000_000)


def test_texts_within_the_bounds() -> None:
    assert str(Step.parse(step())) == str(Step.parse(str(Step.parse(step()))))
    assert Plan.parse(chain(1000)).offset(999) == 999


def test_lists_of_lengths_have_a_bound_on_lines_and_members(cli: Commands) -> None:
    line = "plan --model gpt-7b --device a100-80g --pp 2 --lengths"
    Path("many.txt").write_text("1\n" * 5_000_001)
    assert "has 5000001 lines; expected at most 5000000" in cli.refused(f"{line} many.txt")
    Path("members.gz").write_bytes(gzip.compress(b"") * 10_001)
    assert "10001 gzip files in one" in cli.refused(f"{line} members.gz")
    Path("members.gz").write_bytes(gzip.compress(b"100\n200\n") * 3)
    assert "documents" in cli.said(f"{line} members.gz")


# What each command writes, and its line; what it prints of the name is escaped.
WRITE = {
    "ü.plan": f"plan --lengths pair --pp 2 --placement even --effort 0 {GPT} -o ü.plan",
    "ü.timed": f"simulate ü.plan {GPT} -o ü.timed",
    "ü.html": "draw ü.plan -o ü.html",
    "ü.txt": "draw ü.plan -o ü.txt",
    "ü.sh": "tune --lengths pair --model llama3-8b --device h100-80g --gpus 2 --context 4096"
    " --effort 0 --batches 1 --script ü.sh",
}


def test_a_name_that_the_terminal_cannot_print_fails_no_command(monkeypatch) -> None:
    for name, line in WRITE.items():
        streams = {
            n: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for n in ("stdout", "stderr")
        }
        for stream, to in streams.items():
            monkeypatch.setattr(sys, stream, to)
        status = main(shlex.split(line))
        said = ""
        for to in streams.values():
            to.flush()
            said += to.buffer.getvalue().decode("ascii")
        assert status == 0 and Path(name).stat().st_size, said
        assert "\\xfc.plan" in said or name != "ü.plan", said
