"""Layers by time: the dynamic program against all partitions, and its use."""

import dataclasses
import json
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.models import model
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind
from megatron_epp.planner import Options
from megatron_epp.planner.choose.choice import RunChoice, partition_by_time, partition_of
from megatron_epp.planner.choose.partition import (
    expected_features,
    fastest_layers,
    layout_flags,
    layout_text,
    stage_layer_seconds,
)
from tests.cost.simple_device import OLD_H100

LENGTHS = [30000, 12000, 5000, 3000, 3000, 900, 700, 400] * 4


def slowest(seconds: np.ndarray, layers: tuple[int, ...]) -> float:
    return max(part.sum() for part in np.split(seconds, np.cumsum(layers)[:-1]))


def every_partition(layers: int, stages: int):
    for boundaries in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *boundaries), (*boundaries, layers), strict=True))


@pytest.mark.parametrize(
    ("name", "pp", "tp"),
    [("llama3-8b", 4, 8), ("deepseek-v3", 3, 8), ("gpt-oss-20b", 4, 4), ("qwen3-30b-a3b", 3, 4)],
)
def test_no_partition_is_faster(name: str, pp: int, tp: int) -> None:
    """All of them judged, on models with few enough layers."""
    try:
        cost = named_cost(name, "h200-141g", pp=pp, tp=tp, memory_budget_gib=1e5)
    except ValueError as error:  # not a model of that name here
        pytest.skip(str(error))
    if sum(cost.layout.layers) > 64:
        pytest.skip("too many partitions")
    features = expected_features(cost, [LENGTHS])
    seconds = stage_layer_seconds(cost, features)[0]
    found = fastest_layers(cost, features)
    assert found is not None
    best = min(slowest(seconds, each) for each in every_partition(len(seconds), pp))
    assert slowest(seconds, found) == pytest.approx(best, rel=1e-12)
    assert slowest(seconds, found) <= slowest(seconds, cost.layout.layers)


def test_the_head_takes_layers_from_the_last_stage() -> None:
    cost = named_cost("llama3-8b", OLD_H100, pp=4, cp=8)
    found = fastest_layers(cost, expected_features(cost, [LENGTHS]))
    assert found is not None and found[-1] < 8 and sum(found) == 32


def test_states_that_fit_nowhere_are_no_partition() -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8)
    small = cost.replace(device_budget_bytes=(1e6, 1e6))
    assert fastest_layers(small, expected_features(cost, [LENGTHS])) is None


def test_a_stage_with_little_memory_gets_few_layers() -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=4)
    per_layer = cost.memory.states_bytes[0] / 16
    tight = cost.replace(device_budget_bytes=(10 * per_layer, 1e12))
    found = fastest_layers(tight, expected_features(cost, [LENGTHS]))
    assert found is not None and found[0] < 10


def test_plans_judge_and_a_gain_below_the_models_truth_is_none() -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=4, cp=8)
    even = cost.layout.layers

    def indifferent(of: Cost) -> float:
        return 1.0 if of.layout.layers == even else 0.999

    assert partition_by_time(cost, [LENGTHS], indifferent).key == even

    def only_even_fits(of: Cost) -> float | None:
        return 1.0 if of.layout.layers == even else None

    found = partition_by_time(cost, [LENGTHS], only_even_fits)
    assert found.key == found.cost.layout.layers == even and found.gain == 0
    assert None in found.seconds.values()


def test_a_partition_by_plans_is_faster_by_plans() -> None:
    cost = named_cost("llama3-8b", OLD_H100, pp=4, cp=8, logits_held=False)
    found = partition_of(cost, [LENGTHS], Options(effort=0), "epp")
    assert isinstance(found, RunChoice) and found.cost.layout.layers == found.key
    assert found.gain > 0.02
    assert found.seconds[found.key] == min(filter(None, found.seconds.values()))


def test_flags_are_megatrons() -> None:
    assert layout_flags((8, 8, 8)) == []
    assert layout_flags((9, 8, 8, 7)) == [
        *("--decoder-first-pipeline-num-layers", "9"),
        *("--decoder-last-pipeline-num-layers", "7"),
    ]
    assert layout_flags((9, 9, 8, 6)) == [
        "--pipeline-model-parallel-layout",
        "Et*9|t*9|t*8|t*6L",
    ]
    assert layout_text((5, 1)) == "Et*5|tL"


def test_layouts_are_what_megatron_reads() -> None:
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    random = Random(0)
    for _ in range(20):
        layers = tuple(random.randint(1, 12) for _ in range(random.randint(1, 8)))
        rows = layout.PipelineParallelLayerLayout.parse_str_to_list(layout_text(layers))
        names = [[each.name for each in row] for row in rows]
        assert [row.count("decoder") for row in names] == list(layers)
        assert names[0][0] == "embedding" and names[-1][-1] == "loss"


# ------------------------------------------------------------------ further tokens


def predicting(name: str, depths: int, tmp_path: Path) -> str:
    """A file of the named model with so many depths behind its last layer."""
    plain = model(name)
    kinds = {"plain": {}, "further": {"predicts": True}}
    sizes = {
        field.name: getattr(plain, field.name)
        for field in dataclasses.fields(plain)
        if field.name not in ("kinds", "pattern")
    }
    pattern = f"{plain.layers}*plain {depths}*further"
    layers = plain.layers + depths
    made = {**sizes, "name": "predicting", "layers": layers, "kinds": kinds, "pattern": pattern}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(made))
    return str(path)


def test_depths_stay_on_the_last_stage_with_a_head_each(tmp_path: Path) -> None:
    """And all of the others go where the slowest stage is fastest."""
    name, depths = predicting("llama3-8b", 2, tmp_path), 2
    cost = named_cost(name, "h200-141g", pp=4, tp=8, memory_budget_gib=1e5)
    plain = named_cost("llama3-8b", "h200-141g", pp=4, tp=8, memory_budget_gib=1e5)
    assert (
        cost.layout.layers == (8, 8, 8, 10)
        and cost.layout.predictions == 3
        and cost.layout.pinned_layers == 3
    )
    features = expected_features(cost, [LENGTHS])
    found = fastest_layers(cost, features)
    seconds = stage_layer_seconds(cost, features)[0]
    allowed = [each for each in every_partition(len(seconds), 4) if each[-1] > depths]
    assert found in allowed
    best = min(slowest(seconds, each) for each in allowed)
    assert slowest(seconds, found) == pytest.approx(best, rel=1e-12)
    assert layout_flags((9, 9, 9, 7), 2)[-1] == "5"
    layout, one = plain.layout, plain.seconds.per(Kind.FORWARD)
    head = layout.row(layout.profile.last_seconds[Kind.FORWARD])
    more = cost.seconds.per(Kind.FORWARD)[-1] - one[-1]
    layer = (one[-1] - head) / 8
    # A projection of 2h to h: 2 h^2 of a layer's parameters, and gathers of its own.
    assert (more > depths * (layer + head) * (1 - 1e-12)).all()
    assert more[0] < depths * (1.4 * layer[0] + head[0])
    # Wherever the words lie: H is a stage's part of three heads.
    spread, other = cost.with_vocabulary(True), plain.with_vocabulary(True)
    ratio = spread.seconds.per(Kind.HEAD)[:, 0] / other.seconds.per(Kind.HEAD)[:, 0]
    assert ratio == pytest.approx(3)


def test_layers_that_leave_depths_alone_are_refused(tmp_path: Path) -> None:
    name = predicting("llama3-8b", 2, tmp_path)
    with pytest.raises(ValueError, match="the last 2 predict further tokens and lie on the last"):
        named_cost(name, "h200-141g", pp=2, layers=(32, 2))
