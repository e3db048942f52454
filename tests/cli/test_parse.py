"""Command lines: what is parsed, and what is refused, in one line that says what to do."""

import dataclasses
import json
import sys

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cli.options import COMMANDS, DOING, parse
from megatron_epp.cli.plan import levers_of, options_of
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES, device
from megatron_epp.cost.catalogue.models import model
from megatron_epp.planner.options import TRAINING_LEVERS
from tests.cli.commands import GPT

LLAMA = "--model llama3-8b --device h100-80g"
QWEN = "--model qwen3-30b-a3b --device h100-80g --pp 4 --tp 8"
# The beginning of a command line -> {its other words: what its one line says}.
REFUSED = {
    "": {
        "": "no command; expected one of plan, compare",
        "chck": "unknown command 'chck'; did you mean check?",
        "--help-me": "unknown option '--help-me'",
        "serve --pp 2": "serve was removed; training starts its planner processes itself",
        "plan --lenths wlb": "unknown option '--lenths'; did you mean --lengths",
        "check": "PLAN",
        "check a.plan --width 80": "unknown option '--width'",
        "check no.plan": "plan no.plan: No such file; `python -m megatron_epp plan ... -o FILE`",
        "check binary": "is not UTF-8 text",
        "check /dev/zero": "plan /dev/zero: longer than 256 MiB",
        "draw a.plan --records /dev/zero": "/dev/zero",
        "draw a.plan --width 1000000": "whole number of at most 100000",
        f"draw a.plan --width {'9' * 5000}": "whole number of at most 100000",
        "draw a.plan --replica 1": "--replica 1: a.plan holds 1 of 1 replicas, from 0",
        "draw a.plan -o folder.svg": "is a folder",
        "draw a.plan -o x.gif": "unknown ending '.gif'",
        "draw a.plan -o x.csv": "the CSV of torch.distributed.pipelining was removed",
        "draw a.plan -o no/x.svg": "cannot write",
        "check a.plan --layers 16 15": "--layers has no effect without a machine",
        "draw a.plan --memory-budget-gib 1": "--memory-budget-gib has no effect without a machine",
        "draw a.plan --topology flat": "--topology has no effect without a machine",
        f"simulate a.plan {GPT} --vocab-parallel on": "the plan has no ops H and G; leave the opt",
        f"simulate a.plan {GPT} --layers 15 17": "--layers: the plan is for layers 16 16; leave",
    },
    f"plan {GPT} --lengths": {
        "wikpedia --pp 2": "did you mean wikipedia?",
        "wlb": "--pp is missing",
        "wlb --pp auto": "argument --pp: 'auto' is no longer searched; expected a number (tune",
        "huge --pp 2": "at most 2147483647",
        "many --pp 2": "6442450941 inputs in 3 documents; expected at most 4294967296",
        "/dev/zero --pp 2": "/dev/zero",
    },
    f"plan --lengths wlb --pp 2 {GPT}": {
        "--pp 33": "pp 33: expected 1 to 32, the layers",
        "--pp 0": "argument --pp: '0': expected a whole number of at least 1",
        "--memory-budget-gib 0.5": "memory budget 0.5 GiB: stage 0 needs more than",
        "--memory-budget-gib -1": "expected a number above 0, in GiB",
        "--memory-budget-gib 1e300": "expected a number from 1e-06 to 1e+06, in GiB",
        "--planner infinpipe": "infinipipe",
        "--levers wspilt": "wsplit",
        "--levers local --cp 1": "expected --cp above 1",
        "--overlong splt": "did you mean split?",
        "--contxt 5": "unknown option '--contxt'; did you mean --context",
        "--zero 2": "argument --zero: '2': expected 1, 3",
        "--layers 8 8 16": "3 numbers for 2 stages",
        "--layers 8 8": "add up to 32",
        "--tp 3": "--tp 3 --cp 8: their product must divide the 32 attention heads of gpt-7b",
        "--model gpt-7": "unknown model 'gpt-7'; did you mean gpt-7b",
        "--device a100": "unknown device 'a100'; did you mean a100-80g",
        "--device odd.json": "device file odd.json: a whole number of 401 digits: expected at",
        "--cost-model no/such.json": "no/such.json: No such file",
        "--batch 100000000000000": "batch 100000000000000 of 512 documents: needs more than 42949",
        "--global-batch-size 100000000": "whole number of at most 32768",
        "--multiple 999999999999999": "whole number of at most 1048576",
        "--effort 1000000000000": "whole number of at most 1000000",
        "--no-kv-read": "--kv-read was removed; costs are those of training",
        "--partition auto": "--partition was removed; leave it out: --placement auto, the default",
        "--devices 4": "--devices was removed; give --pp and --cp; tune --gpus N",
        "--host-memory-gib 1 --levers default,-offload": "has no effect without the lever offload",
        "--vocab-parallel yes": "'yes': expected auto, on, off",
        "--vocab-parallel on --pp 1": "on shards the LM head over the stages, and there is one",
        "--vocab-parallel on --planner flexsp": "on has no effect on flexsp, which makes no pipel",
        "--placement no": "--placement no: No such file",
        "--placement auto --layers 16 16": "--placement auto chooses the layers of the stages",
        "--placement auto --pp 1": "--placement auto has no effect with one stage; leave it out",
        "--placement auto --planner flexsp": "--placement auto has no effect on flexsp, which",
        "--placement v --planner flexsp": "--placement v has no effect on flexsp, which makes no",
        "--placement v --planner infinipipe": "expected the placement one stage a rank",
        "--placement v --layers 16 16": "--layers: 2 numbers for 4 stages",
        "--placement v --pp 17": "--placement v: 34 stages for 32 layers; expected at most one st",
        "--placement place 0 1 layers 9 9": "layers 9 9: expected 2 numbers that add up to 32",
        "--placement place 0 1 layers 9 23 --layers 16 16": "both name the layers of every stage",
        "--placement a.plan": "--placement a.plan: line 1 ('plan v1'): expected 'place' and",
    },
    "plan --lengths wlb --pp 2": {
        "": "--model is missing; expected one of gpt-7b, gpt-13b",
    },
    f"plan --lengths lengths {QWEN}": {
        "--ep 0": "argument --ep: '0'",
        "--ep 3": "ep 3: expected a divisor of tp x cp, 8, or a multiple of it whose ",
        "--ep 12 --dp 2": "ep 12: expected a divisor of tp x cp, 8, or a multiple of it",
        "--layer-kinds 48*experts": "--layer-kinds: the model says what its layers are; ",
        "--ep 16 --dp 3": "--ep: 2 replicas in lockstep; expected a divisor of --dp 3",
        "--lockstep 2 --dp 4": "--lockstep was removed; --ep, --tp and --cp imply it, as in train",
        "--ep 32 --dp 2 --cp 2 --levers local": "have all documents sharded",
        "--ep 16 --dp 2 --planner flexsp": "planner 'flexsp' knows no replicas in",
    },
    f"compare --lengths wlb --pp 2 {GPT}": {
        "--batches many": "argument --batches: 'many'",
        "--batches 999999999999999": "expected a whole number of at most 100000",
        "--planner epp pakcing": "did you mean packing",
    },
    f"tune {LLAMA} --lengths spread --effort 0 --global-batch-size 8 --batches 1": {
        "": "--gpus is missing; expected the number of devices (or --nodes)",
        "--nodes 0": "expected a whole number of at least 1",
        "--gpus 16 --nodes 2": "--gpus 16: is nodes x devices of a node; leave --nodes 2 out",
        "--gpus 12": "--gpus 12: no whole number of nodes of 8 devices; expected a multiple",
        "--gpus 16,x": "argument --gpus: 'x': expected a whole number",
        "--gpus 8,16": "--gpus: several numbers are a table of what fits",
        "--nodes 1 --global-batch-size 7 --tp 3": "no tp x cp x pp x dp fills them",
        "--nodes 1 --topology tree": "unknown topology 'tree'",
        "--nodes 1 --topology railx": "its nodes have 16 devices; give --devices-per-node 16",
        "--nodes 1 --hostfile x": "--hostfile: expected a --topology file that has nodes",
        "--nodes 1 --grid-svg x": "--grid-svg was removed; tune prints the grid",
        "--nodes 1 --levers magic": "unknown lever 'magic'",
        "--nodes 1 --memory-budget-gib 1": "no layout of the 8 devices works",
        "--nodes 1 --device h100-80g*2,a100-40g*2": "several devices are no longer accepted",
        "--nodes 1 --ep 4": "ep 4: the model has no experts; leave it out",
        "--nodes 1 --for verl": "--for was removed; set degrees and layers in the framework's",
        "--nodes 1 --like llama": "--like llama: llama3-8b is not a config.json",
    },
    f"tune {LLAMA} --gpus 8": {
        "--html x.html": "--html was removed; plan the row",
        "--row 2": "--row: of a survey; expected --lengths too",
        "--device h100": "unknown device 'h100'; did you mean h100-80g",
        "--device x": "Known: a100-40g, a100-80g, h100-80g, h200-141g, h800-80g, h20-96g",
    },
}  # fmt: skip
ROWS = [(f"{start} {rest}", told) for start, rows in REFUSED.items() for rest, told in rows.items()]


@pytest.mark.parametrize(("line", "told"), ROWS, ids=[line[-60:] for line, _ in ROWS])
def test_what_is_refused(cli, folder, line, told) -> None:
    (folder / "folder.svg").mkdir()
    (folder / "binary").write_bytes(b"\xff\xfe\x00plan")
    (folder / "huge").write_text("2147483648\n")
    (folder / "many").write_text("2147483647\n" * 3)
    odd = dataclasses.asdict(DEVICES["h100-80g"]) | {"linear_flops": 10**400}
    (folder / "odd.json").write_text(json.dumps(odd))
    assert told in cli.refused(line)


ON_TWO = "--lengths wlb --pp 2"
ON_CPUS = "--model gpt-7b --device cpu"


@pytest.mark.parametrize(
    ("line", "levers"),
    [
        *((f"{name} {ON_TWO} {GPT}", TRAINING_LEVERS) for name in ("plan", "compare")),
        *((f"{name} {ON_TWO} {ON_CPUS}", TRAINING_LEVERS) for name in ("plan", "compare")),
        (f"plan {ON_TWO} {GPT} --host-memory-gib 9", TRAINING_LEVERS | {"offload"}),
        (f"plan {ON_TWO} {GPT} --levers default,-wsplit", TRAINING_LEVERS - {"wsplit"}),
        (f"plan {ON_TWO} --cost-model h100-80g.json", TRAINING_LEVERS),
        (f"plan {ON_TWO} --cost-model cpu.json", TRAINING_LEVERS),
        (f"tune {LLAMA} --nodes 1 --lengths wlb", TRAINING_LEVERS),
        (
            f"tune {LLAMA} --nodes 1 --lengths wlb --host-memory-gib=9",
            TRAINING_LEVERS | {"offload"},
        ),
        (f"tune {ON_CPUS} --nodes 1 --lengths wlb --host-memory-gib=9", TRAINING_LEVERS),
    ],
)
def test_the_levers_of_training_on_the_device_are_the_default(line, levers) -> None:
    """What can only be simulated must be named."""
    for name in ("h100-80g", "cpu"):
        profile(model("gpt-7b"), device(name), logits_held=False).save(f"{name}.json")
    found = parse(line.split())
    assert levers_of(found) == levers
    if found.command != "tune":
        assert options_of(found).levers == levers


@pytest.mark.parametrize("command", [None, *(c for c in COMMANDS if c not in DOING)])
def test_every_command_explains_itself_in_80_columns(capsys, monkeypatch, command) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["--help"] if command is None else [command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: megatron_epp" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("command", DOING)
def test_commands_that_need_torch_say_so(monkeypatch, cli, command) -> None:
    monkeypatch.setitem(sys.modules, f"megatron_epp.mcore.{DOING[command]}", None)
    assert "is not installed" in cli.refused(command)


def test_commands_that_need_a_compiler_say_so(monkeypatch, cli) -> None:
    monkeypatch.delitem(sys.modules, "megatron_epp.cli.draw", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_epp.show.paint", None)
    assert "is not installed" in cli.refused("draw a.plan")


def test_words_of_numpy_become_one_line(cli, monkeypatch) -> None:
    """Whatever bound is missing: no warning of numpy's reaches the user."""
    import numpy as np

    from megatron_epp.cli import plan as command

    monkeypatch.setattr(command, "open_batches", lambda *_: np.array([1e308]) * 1e308)
    told = cli.refused(f"plan {ON_TWO} {GPT}")
    assert "too large or too small together" in told and "overflow encountered" in told
