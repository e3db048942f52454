"""Layers of several kinds through the command line: --ep, --layer-kinds, model files, pictures."""

from pathlib import Path

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.ir import Step
from tests.cli.commands import LENGTHS, Commands
from tests.cost.simple_device import OLD_H100
from tests.ir.test_lockstep import STEP

QWEN = (
    "plan --lengths lengths --effort 0 --model qwen3-30b-a3b --device h100-80g --pp 4 --tp 8 "
    "--placement even"
)
# A machine known by a profile file alone.
MEASURED = (
    "plan --lengths lengths --effort 0 --pp 2 --cost-model two.json --layers 2 2 "
    "--memory-budget-gib 10"
)


@pytest.fixture(autouse=True)
def two_kinds(folder: Path) -> None:
    kinds = {"dense": LayerShape(), "local": LayerShape(window=64)}
    shape = Model("m", 4, 64, 176, 4, 2, 16, 1000, gated=True, kinds=kinds, pattern="dense 3*local")
    profile(shape, device(OLD_H100)).save("two.json")


def test_the_degree_of_experts_has_an_effect(cli: Commands) -> None:
    """Fewer devices share them: more memory, fewer bytes on the way."""
    eight, four, default = (cli.facts(f"{QWEN} {ep}") for ep in ("--ep 8", "--ep 4", ""))
    assert max(four["peak_bytes"]) > 1.2 * max(eight["peak_bytes"])
    assert four["comm_ratio"] < eight["comm_ratio"]
    assert default["peak_bytes"] == eight["peak_bytes"]
    cli.said(f"{QWEN} --ep 4 -o a.plan")
    assert "--ep 4" in Path("a.plan").read_text().split("\n")[0]


def test_which_layer_is_which_must_be_named_and_has_an_effect(cli: Commands) -> None:
    """Layers with a window take less time: of the first stage's, or of neither's."""
    far, near, mixed = (
        cli.facts(f"{MEASURED} --layer-kinds '{kinds}'")["seconds"]
        for kinds in ("4*dense", "4*local", "2*dense 2*local")
    )
    assert near < mixed <= far
    told = cli.refused(MEASURED)  # what does not fit the profile: tests/cost/test_layer_kinds.py
    assert "--layer-kinds is missing: the profile knows the kinds dense, local; expected" in told


def test_a_plan_tells_for_which_kinds_it_is(cli: Commands) -> None:
    """Also to those who simulate and draw it later; a picture and a report name the kinds."""
    told = cli.said(f"{MEASURED} --layer-kinds 'dense 3*local' -o a.plan")
    assert "layers      dense 3*local" in told
    assert "--layer-kinds 'dense 3*local'" in Path("a.plan").read_text().split("\n")[0]
    told = cli.said("simulate a.plan")
    assert "1 dense, 1 local" in told and "2 local" in told
    cli.said("draw a.plan -o a.svg")
    assert "layers dense 3*local" in Path("a.svg").read_text()


def test_compare_speaks_of_the_kinds(cli: Commands) -> None:
    machine = "--model gpt-oss-20b --device h100-80g --pp 2 --tp 8"
    line = f"compare --lengths lengths {machine} --effort 0"
    told = cli.joined(f"{line} --planner epp packing infinipipe megatron-hybrid-cp")
    assert "of the kinds 12*(window full), ep 8" in told
    assert "kinds" not in cli.facts(f"{line} --planner packing")[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_planned_for(cli: Commands, name: str) -> None:
    """On as many stages as hold its states."""
    pp = {"deepseek-v3": 16, "qwen3-235b-a22b": 8}.get(name, 4)
    tp = 4 if name == "gpt-30b" else 8  # of 52 heads
    machine = f"--model {name} --device h200-141g --pp {pp} --tp {tp} --dp 4"
    made = cli.facts(f"plan --lengths lengths --planner packing {machine}")
    step = Step.parse(made["plan"])
    assert sum(step.plans[0].layers) == MODELS[name].layers
    assert made["fits"]


# ------------------------------------------------------------------ experts that replicas share

SHARED = f"{QWEN} --dp 2 --ep 16 --context 16384"


def test_replicas_that_share_experts_are_planned_in_lockstep(cli: Commands) -> None:
    text = cli.said(f"{SHARED} -o p.step")
    assert "lockstep    blocks of 2 replicas, " in text and " chunks empty\n" in text
    step = Step.parse(Path("p.step").read_text())
    assert step.lockstep == 2 and step.lengths == LENGTHS
    assert cli.said("check p.step").count("ok: ") == 2
    facts = cli.facts(SHARED)
    alone = cli.facts(f"{SHARED} --ep 8")
    assert Step.parse(alone["plan"]).lockstep == 1
    # Op by op together: the replicas' plans take the same time, by the slower one's ops.
    taken = [cli.facts(f"simulate p.step --replica {replica}")["seconds"] for replica in (0, 1)]
    assert taken[0] == pytest.approx(taken[1]) == pytest.approx(facts["seconds"])
    assert "stage 0" in cli.said("draw p.step --replica 1")


def test_compare_plans_in_lockstep(cli: Commands) -> None:
    line = f"{SHARED.replace('plan', 'compare', 1)} --planner packing flexsp"
    text = cli.said(line)
    assert "flexsp failed: batch 0: planner 'flexsp' knows no replicas in lockstep" in text
    assert "flexsp failed" not in cli.said(f"{line} --ep 8")


def test_a_broken_skeleton_is_drawn(cli: Commands) -> None:
    """Each plan can run alone, not beside the other."""
    head, _, last = STEP.rpartition("B1 B0 F2 B2")
    Path("p.step").write_text(f"{head}B1 F2 B0 B2{last}")
    for command in ("check", "simulate", "draw"):
        told = cli.ran(f"{command} p.step", 2)
        assert "p.step: lockstep 2: replica 1 runs F2 on stage 1 where replica 0" in told.err
        if command == "check":
            assert told.out.splitlines()[-1] == "  replica 1:  F0  F1  B1 >F2  B0  B2"
