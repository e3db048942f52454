"""Ranks that were measured slower than others: seconds, and the layers that follow."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL, OF_LAYERS, Chunk, Kind, Plan, Span
from megatron_epp.planner.choose.partition import expected_features, fastest_layers

LENGTHS = [30000, 12000, 5000, 3000, 3000, 900, 700, 400] * 4
MACHINE = ("--lengths", "wlb", "--model", "llama3-8b", "--pp", "4", "--cp", "8")
BATCH = ("--context", "16384", "--global-batch-size", "16", "--effort", "0")


def slower(*slowness: float, **layout: object) -> tuple[Cost, Cost]:
    """A cost of equally fast ranks, and of ranks with this slowness."""
    alone = named_cost("llama3-8b", "h100-80g", pp=len(slowness), cp=8, **layout)
    profile = replace(alone.layout.profile, rank_slowness=slowness)
    return alone, alone.replace(profile=profile)


def test_ranks_measured_slower_take_longer(tmp_path: Path, capsys) -> None:
    alone, mixed = slower(1.0, 2.0)
    for kind in OF_LAYERS:
        computed = mixed.seconds.per(kind) - mixed.seconds.communication_per(kind)
        known = alone.seconds.per(kind) - alone.seconds.communication_per(kind)
        assert np.allclose(computed, known * [[1.0], [2.0]], rtol=1e-12)
        same = mixed.seconds.communication_per(kind), alone.seconds.communication_per(kind)
        assert np.array_equal(*same)
    assert mixed.memory.states_bytes == alone.memory.states_bytes
    loads = alone.loads([Chunk((Span(0, 0, 100),)), Chunk((Span(1, 0, 300),))], [100, 300])
    again = alone.seconds.recompute((0, FULL), loads)
    assert np.array_equal(mixed.seconds.recompute((0, FULL), loads), [again, 2 * again])
    features = expected_features(mixed, [LENGTHS])
    found = fastest_layers(mixed, features)
    assert found is not None and 20 <= found[0] <= 22  # of 32; the output layer is on the slow one
    placed = mixed.replace(layers=(8,) * 4, place=(0, 1, 1, 0))
    assert placed.seconds.per(Kind.FORWARD)[1, 0] > 1.7 * placed.seconds.per(Kind.FORWARD)[0, 0]
    found = fastest_layers(placed, expected_features(placed, [LENGTHS]))
    assert found is not None and found[0] + found[3] > found[1] + found[2]
    with pytest.raises(ValueError, match="measured on 2 pipeline ranks whose devices differ"):
        mixed.replace(layers=(8,) * 4, device_budget_bytes=(1e11,) * 4)
    # By the command, too.
    file = tmp_path / "cost.json"
    mixed.layout.profile.save(str(file))
    measured = ("--cost-model", str(file), "--device", "h100-80g")
    words = ("plan", *MACHINE[:4], *measured, "--cp", "8", *BATCH)
    auto = ("--planner", "infinipipe", "-o", str(tmp_path / "a.plan"))
    assert main([*words, "--pp", "2", *auto]) == 0
    plan = Plan.parse((tmp_path / "a.plan").read_text())
    assert plan.layers[0] > 18
    capsys.readouterr()
    assert main([*words, "--pp", "4"]) == 2
    said = capsys.readouterr().err
    assert "measured on 2 pipeline ranks whose devices differ" in said and said.count("\n") == 1


def test_a_list_of_devices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("h100-80g*2,a100-80g*2", "h100-80g,a100-80g", "h100-80g*4"):
        assert main(["plan", *MACHINE, "--device", text, *BATCH]) == 2
        error = capsys.readouterr().err
        assert f"device {text!r}: several devices are no longer accepted" in error
        assert error.count("\n") == 1
