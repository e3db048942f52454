"""Devices that differ by rank: seconds, budgets, links, and the layers that follow."""

import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import GIB, device
from megatron_epp.ir import FULL, OF_HEAD, OF_LAYERS, Chunk, Kind, Plan, Span
from megatron_epp.planner.choose.partition import (
    expected_features,
    fastest_layers,
    stage_layer_seconds,
)

MIXED = "h100-80g*2,a100-40g*2"
LENGTHS = [30000, 12000, 5000, 3000, 3000, 900, 700, 400] * 4
MACHINE = ("--lengths", "wlb", "--model", "llama3-8b", "--pp", "4", "--cp", "8")
BATCH = ("--context", "16384", "--global-batch-size", "16", "--effort", "0")


def test_alike_is_one_device() -> None:
    for text in ("h100-80g*4", "h100-80g,h100-80g*3"):
        assert named_cost("llama3-8b", text, pp=4) == named_cost("llama3-8b", "h100-80g", pp=4)


@pytest.mark.parametrize("cut", [False, True])
def test_each_stage_has_its_devices_figures(cut: bool) -> None:
    layout = {"pp": 4, "cp": 8, "topology": "nodes", "vocabulary_parallel": cut}
    mixed = named_cost("llama3-8b", MIXED, **layout)
    alone = [named_cost("llama3-8b", name, **layout) for name in ("h100-80g", "a100-40g")]
    of_stage = [alone[0], alone[0], alone[1], alone[1]]
    for kind in (*OF_LAYERS, *OF_HEAD):
        rows = [one.seconds.per(kind)[stage] for stage, one in enumerate(of_stage)]
        assert np.array_equal(mixed.seconds.per(kind), rows)
    loads = mixed.loads([], [])
    assert mixed.seconds.recompute((0, FULL), loads).shape == (4, 0)
    assert mixed.device_budget_bytes == (74 * GIB, 74 * GIB, 37 * GIB, 37 * GIB)
    fast, slow = (one.layout.profile.link_seconds_per_token for one in alone)
    assert fast < slow
    links = mixed.layout.links_per_token.tolist()
    assert links == [fast, slow, slow, slow]  # the last one goes round
    assert mixed.memory.states_bytes == alone[0].memory.states_bytes


def test_ranks_measured_slower_take_longer(tmp_path: Path, capsys) -> None:
    alone = named_cost("llama3-8b", "h100-80g", pp=2, cp=8)
    profile = replace(alone.layout.profile, rank_slowness=(1.0, 2.0))
    mixed = alone.replace(profile=profile)
    for kind in OF_LAYERS:
        computed = mixed.seconds.per(kind) - mixed.seconds.communication_per(kind)
        known = alone.seconds.per(kind) - alone.seconds.communication_per(kind)
        assert np.allclose(computed, known * [[1.0], [2.0]], rtol=1e-12)
    assert mixed.memory.states_bytes == alone.memory.states_bytes
    features = expected_features(mixed, [LENGTHS])
    found = fastest_layers(mixed, features)
    assert found is not None and 20 <= found[0] <= 22  # of 32; the output layer is on the slow one
    placed = mixed.replace(layers=(8,) * 4, place=(0, 1, 1, 0))
    assert placed.seconds.per(Kind.FORWARD)[1, 0] > 1.7 * placed.seconds.per(Kind.FORWARD)[0, 0]
    with pytest.raises(ValueError, match="measured on 2 pipeline ranks whose devices differ"):
        mixed.replace(layers=(8,) * 4, device_budget_bytes=(1e11,) * 4)
    # By the command, too.
    file = tmp_path / "cost.json"
    profile.save(str(file))
    measured = ("--cost-model", str(file), "--device", "h100-80g")
    words = ("plan", *MACHINE[:4], *measured, "--cp", "8", *BATCH)
    auto = ("--partition", "auto", "-o", str(tmp_path / "a.plan"))
    assert main([*words, "--pp", "2", *auto]) == 0
    plan = Plan.parse((tmp_path / "a.plan").read_text())
    assert plan.layers[0] > 18
    capsys.readouterr()
    assert main([*words, "--pp", "4"]) == 2
    said = capsys.readouterr().err
    assert "measured on 2 pipeline ranks whose devices differ" in said and said.count("\n") == 1


def test_a_rank_of_several_stages_has_one_device() -> None:
    mixed = named_cost("llama3-8b", "h100-80g,a100-40g", pp=4, cp=8, place=(0, 1, 1, 0))
    alone = named_cost("llama3-8b", "a100-40g", pp=4, cp=8)
    rows = mixed.seconds.per(Kind.FORWARD)
    assert np.array_equal(rows[1:3], alone.seconds.per(Kind.FORWARD)[1:3])
    assert (rows[[0, 3], 0] < rows[1, 0]).all()
    assert mixed.device_budget_bytes == (74 * GIB, 37 * GIB)
    found = fastest_layers(mixed, expected_features(mixed, [LENGTHS]))
    assert found is not None and found[0] + found[3] > found[1] + found[2]


def test_recompute_and_copies_are_of_the_stages_device() -> None:
    cost = named_cost("llama3-8b", "h100-80g,a100-80g", pp=2, cp=8)
    loads = cost.loads([Chunk((Span(0, 0, 100),)), Chunk((Span(1, 0, 300),))], [100, 300])
    alone = [named_cost("llama3-8b", name, pp=2, cp=8) for name in ("h100-80g", "a100-80g")]
    for of in (
        lambda one: one.seconds.recompute((0, FULL), loads),
        lambda one: one.memory.copy_seconds(loads),
    ):
        assert np.array_equal(of(cost), [of(one) for one in alone])
    assert cost.layout.profile.host_bytes_per_second == device("a100-80g").host_bytes_per_second


@pytest.mark.parametrize("text", [MIXED, "a100-40g,h200-141g,h100-80g,a100-80g"])
def test_no_partition_is_faster(text: str) -> None:
    cost = named_cost("llama3-8b", text, pp=4, cp=8)
    features = expected_features(cost, [LENGTHS])
    seconds = stage_layer_seconds(cost, features)

    def slowest(layers: tuple[int, ...]) -> float:
        ends = np.cumsum(layers)
        return max(own[e - n : e].sum() for own, e, n in zip(seconds, ends, layers, strict=True))

    found = fastest_layers(cost, features)
    assert found is not None
    every = [
        tuple(b - a for a, b in pairwise((0, *boundaries, 32)))
        for boundaries in combinations(range(1, 32), 3)
    ]
    assert slowest(found) == pytest.approx(min(map(slowest, every)), rel=1e-12)
    assert slowest(found) < slowest(cost.layout.layers)


def test_plan_and_simulate_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow ranks get fewer layers, and that plan is faster than even layers on these devices.

    With half as many documents, hosts determine the time of even layers."""
    batch = [{"16": "32"}.get(word, word) for word in BATCH]

    def planned(*more: str) -> tuple[Plan, dict]:
        path = tmp_path / "p.plan"
        assert main(["plan", *MACHINE, "--device", MIXED, *batch, *more, "-o", str(path)]) == 0
        capsys.readouterr()
        assert main(["simulate", str(path), "--json"]) == 0  # the plan names its devices
        return Plan.parse(path.read_text()), json.loads(capsys.readouterr().out)

    even, at_even = planned()
    auto, at_auto = planned("--partition", "auto")
    assert even.layers == (8, 8, 8, 8)
    assert sum(auto.layers[:2]) > sum(auto.layers[2:])
    assert at_auto["seconds"] < 0.85 * at_even["seconds"]
    assert at_even["budget_bytes"] == [74 * GIB, 74 * GIB, 37 * GIB, 37 * GIB]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100-80g*2,a100-80g", "of 3 ranks, and the pipeline has 4"),
        ("h100-80g*4,a100-80g*4", "of 8 ranks, and the pipeline has 4"),
        ("h100-80g*,a100-80g*2", "'h100-80g*' is not a device with a number"),
        ("h100-80g*2,,a100-80g*2", "'' is not a device with a number"),
        ("h100-80g*x,a100-80g*2", "'h100-80g*x' is not a device with a number"),
        ("h100-80g*2,a100*2", "unknown device 'a100'; did you mean a100-80g"),
        ("h100-80g*2,cpu*2", "a pipeline over CPUs and GPUs"),
    ],
)
def test_bad_lists(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MACHINE, "--device", text, *BATCH]) == 2
    error = capsys.readouterr().err
    assert said in error and re.search(r"error: .*", error) and error.count("\n") == 1, error
