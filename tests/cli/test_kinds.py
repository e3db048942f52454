"""Layers of several kinds through the command line: --ep, --layer-kinds, model files, pictures."""

import json
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.ir import Step
from tests.cli.commands import LENGTHS, refused, said
from tests.cost.simple_device import OLD_H100
from tests.ir.test_lockstep import STEP

QWEN = ["--model", "qwen3-30b-a3b", "--device", "h100-80g", "--pp", 4, "--tp", 8]
KINDS = {"dense": LayerShape(), "local": LayerShape(window=64)}
MODEL = Model("m", 4, 64, 176, 4, 2, 16, 1000, gated=True, kinds=KINDS, pattern="dense 3*local")


@pytest.fixture
def measured(tmp_path) -> list:
    """The options of a machine known by a profile file alone."""
    path = tmp_path / "two.json"
    profile(MODEL, device(OLD_H100)).save(str(path))
    return ["--cost-model", str(path), "--layers", 2, 2, "--memory-budget-gib", 10]


def facts(capsys, lengths, *machine) -> dict:
    return json.loads(said(capsys, "plan", "--lengths", lengths, "--json", "--effort", 0, *machine))


def test_the_degree_of_experts_has_an_effect(capsys, lengths) -> None:
    """Fewer devices share them: more memory, fewer bytes on the way."""
    eight, two = (facts(capsys, lengths, *QWEN, "--ep", ep) for ep in (8, 4))
    assert max(two["peak_bytes"]) > 1.2 * max(eight["peak_bytes"])
    assert two["comm_ratio"] < eight["comm_ratio"]
    assert facts(capsys, lengths, *QWEN)["peak_bytes"] == eight["peak_bytes"]  # the default


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--ep", 3], "ep 3: expected a divisor of tp x cp, 8, or a multiple of it whose "),
        (["--ep", 0], "argument --ep: '0'"),
        (["--layer-kinds", "48*experts"], "--layer-kinds: the model says what its layers are; "),
    ],
)
def test_bad_options_of_a_model(capsys, lengths, words, error) -> None:
    assert error in refused(capsys, "plan", "--lengths", lengths, *QWEN, *words)


def test_which_layer_is_which_has_an_effect(capsys, lengths, measured) -> None:
    """Layers with a window take less time: of the first stage's, or of neither's."""
    far, near = (
        facts(capsys, lengths, *measured, "--pp", 2, "--layer-kinds", kinds)["seconds"]
        for kinds in ("4*dense", "4*local")
    )
    mixed = facts(capsys, lengths, *measured, "--pp", 2, "--layer-kinds", "2*dense 2*local")
    assert near < mixed["seconds"] <= far


def test_kinds_that_a_profile_knows_must_be_named(capsys, lengths, measured) -> None:
    """What does not fit it: tests/cost/test_layer_kinds.py."""
    told = refused(capsys, "plan", "--lengths", lengths, *measured, "--pp", 2)
    assert "--layer-kinds is missing: the profile knows the kinds dense, local; expected" in told


def test_a_plan_tells_for_which_kinds_it_is(capsys, lengths, measured, tmp_path) -> None:
    """Also to those who simulate and draw it later; a picture and a report name the kinds."""
    plan = str(tmp_path / "a.plan")
    kinds = ["--layer-kinds", "dense 3*local"]
    told = said(capsys, "plan", "--lengths", lengths, *measured, "--pp", 2, *kinds, "-o", plan)
    assert "layers      dense 3*local" in told
    assert "--layer-kinds 'dense 3*local'" in Path(plan).read_text().split("\n")[0]
    told = said(capsys, "simulate", plan)
    assert "1 dense, 1 local" in told and "2 local" in told
    picture = tmp_path / "a.svg"
    said(capsys, "draw", plan, "-o", str(picture))
    assert "layers dense 3*local" in picture.read_text()
    both = [*QWEN, "--ep", 4]
    said(capsys, "plan", "--lengths", lengths, *both, "-o", plan, "--effort", 0)
    assert "--ep 4" in Path(plan).read_text().split("\n")[0]


def test_compare_speaks_of_the_kinds(capsys, lengths) -> None:
    machine = ["--model", "gpt-oss-20b", "--device", "h100-80g", "--pp", 2, "--tp", 8]
    words = ["compare", "--lengths", lengths, *machine, "--effort", 0]
    told = said(capsys, *words, "--planner", "epp", "packing", "infinipipe", "megatron-hybrid-cp")
    assert "of the kinds 12*(window full), ep 8" in " ".join(told.split())
    every = json.loads(said(capsys, *words, "--planner", "packing", "--json"))
    assert "kinds" not in every[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_planned_for(capsys, lengths, name) -> None:
    """On as many stages as hold its states."""
    pp = {"deepseek-v3": 16, "qwen3-235b-a22b": 8, "llama3-70b": 4}.get(name, 4)
    tp = 4 if name == "gpt-30b" else 8  # of 52 heads
    machine = ["--model", name, "--device", "h200-141g", "--pp", pp, "--tp", tp, "--dp", 4]
    made = facts(capsys, lengths, *machine, "--planner", "packing")
    step = Step.parse(made["plan"])
    assert sum(step.plans[0].layers) == MODELS[name].layers
    assert made["fits"]


# ------------------------------------------------------------------ experts that replicas share

SHARED = [*QWEN, "--dp", 2, "--ep", 16, "--context", 16384]


def test_replicas_that_share_experts_are_planned_in_lockstep(lengths, tmp_path, capsys) -> None:
    out = tmp_path / "p.step"
    text = said(capsys, "plan", "--lengths", lengths, *SHARED, "-o", out)
    assert "lockstep    blocks of 2 replicas, " in text and "(simulated)" in text
    step = Step.parse(out.read_text())
    assert step.lockstep == 2 and step.lengths == LENGTHS
    assert said(capsys, "check", out).count("ok: ") == 2
    words = "plan", "--lengths", lengths, *SHARED, "--json"
    facts = json.loads(said(capsys, *words))
    free = facts["lockstep"]["free_seconds"]
    assert facts["lockstep"]["replicas"] == 2 and free == pytest.approx(facts["seconds"], rel=0.5)
    alone = json.loads(said(capsys, *(word if word != 16 else 8 for word in words)))
    assert "lockstep" not in alone and Step.parse(alone["plan"]).lockstep == 1
    # Op by op together: the replicas' plans take the same time, by the slower one's ops.
    taken = [
        json.loads(said(capsys, "simulate", out, "--replica", replica, "--json"))["seconds"]
        for replica in (0, 1)
    ]
    assert taken[0] == pytest.approx(taken[1]) == pytest.approx(facts["seconds"])
    assert "stage 0" in said(capsys, "draw", out, "--replica", 1)


def test_compare_says_what_lockstep_costs(lengths, capsys) -> None:
    words = "--planner", "packing", "flexsp"
    text = said(capsys, "compare", "--lengths", lengths, *SHARED, *words)
    assert "In lockstep, blocks of 2 replicas, against replicas that run freely" in text
    assert "flexsp failed: batch 0: planner 'flexsp' knows no replicas in lockstep" in text
    free = said(capsys, "compare", "--lengths", lengths, *SHARED, *words, "--ep", 8)
    assert "lockstep" not in free


def test_a_broken_skeleton_is_drawn(tmp_path, capsys) -> None:
    """Each plan can run alone, not beside the other."""
    out = tmp_path / "p.step"
    head, _, last = STEP.rpartition("B1 B0 F2 B2")
    out.write_text(f"{head}B1 F2 B0 B2{last}")
    for command in ("check", "simulate", "draw"):
        assert main([command, str(out)]) == 2
        told = capsys.readouterr()
        assert "p.step: lockstep 2: replica 1 runs F2 on stage 1 where replica 0" in told.err
        if command == "check":
            assert told.out.splitlines()[-1] == "  replica 1:  F0  F1  B1 >F2  B0  B2"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ep", 16, "--dp", 3), "--ep: 2 replicas in lockstep; expected a divisor of --dp 3"),
        (("--lockstep", 3, "--dp", 4), "--lockstep: 3 replicas in lockstep; expected a divisor"),
        (("--ep", 32, "--dp", 4, "--lockstep", 2), "--lockstep 2: 4 replicas share a layer's exp"),
        (("--ep", 16, "--dp", 2, "--planner", "flexsp"), "planner 'flexsp' knows no replicas in"),
        (("--ep", 12, "--dp", 2), "ep 12: expected a divisor of tp x cp, 8, or a multiple of it"),
    ],
)
def test_blocks_that_cannot_be(lengths, words, says, capsys) -> None:
    assert main(list(map(str, ["plan", "--lengths", lengths, *QWEN, *words]))) == 2
    assert says in capsys.readouterr().err
