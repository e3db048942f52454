"""Layers by time: the dynamic program against all partitions, and its use."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.models import model
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind
from megatron_epp.ir.placement import EVENLY, named_placement
from megatron_epp.planner.choose import choice
from megatron_epp.planner.choose.choice import PARTITION_PAYS, RunChoice, run_choice, with_placement
from megatron_epp.planner.choose.partition import (
    expected_features,
    fastest_layers,
    layout_flags,
    layout_text,
    stage_layer_seconds,
)
from megatron_epp.planner.options import Options
from tests.cost.simple_device import OLD_H100

LENGTHS = [30000, 12000, 5000, 3000, 3000, 900, 700, 400] * 4


def slowest(cost: Cost, seconds: list[np.ndarray], layers: tuple[int, ...]) -> float:
    """Seconds of the slowest rank; ``seconds``: of every layer on every stage."""
    ends = np.cumsum(layers)
    parts = [own[e - n : e].sum() for own, e, n in zip(seconds, ends, layers, strict=True)]
    return max(cost.layout.placement.of_ranks(parts))


def every_partition(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for boundaries in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *boundaries, layers)))


def roomy(model: str, pp: int, tp: int) -> Cost:
    return named_cost(model, "h200-141g", pp=pp, tp=tp, memory_budget_gib=1e5)


def placed(name: str) -> Cost:
    cost = named_cost("llama3-8b", OLD_H100, pp=2, tp=8, logits_held=False)
    return with_placement(cost, named_placement(name, 2))


def slow_ranks() -> Cost:
    alone = named_cost("llama3-8b", "h100-80g", pp=4, cp=8)
    profile = dataclasses.replace(alone.layout.profile, rank_slowness=(2.5, 1.0, 1.3, 1.7))
    return alone.replace(profile=profile)


# Models with few enough layers, ranks measured slower than others, placements, and MTP layers,
# which stay on the last stage.
PARTITIONED: Mapping[str, Callable[[Path], Cost]] = {
    "llama3-8b": lambda path: roomy("llama3-8b", 4, 8),
    "deepseek-v3": lambda path: roomy("deepseek-v3", 3, 8),
    "gpt-oss-20b": lambda path: roomy("gpt-oss-20b", 4, 4),
    "qwen3-30b-a3b": lambda path: roomy("qwen3-30b-a3b", 3, 4),
    "slow ranks": lambda path: slow_ranks(),
    "v": lambda path: placed("v"),
    "interleaved": lambda path: placed("interleaved 2"),
    "neighbours": lambda path: placed("place 0 0 1 1"),
    "MTP": lambda path: roomy(predicting("llama3-8b", 2, path), 4, 8),
}


@pytest.mark.parametrize("name", PARTITIONED)
def test_no_partition_is_faster(name: str, tmp_path: Path) -> None:
    """All of them judged."""
    cost = PARTITIONED[name](tmp_path)
    features = expected_features(cost, [LENGTHS])
    seconds = stage_layer_seconds(cost, features)
    found = fastest_layers(cost, features)
    allowed = [
        layers
        for layers in every_partition(len(seconds[0]), cost.layout.stages)
        if layers[-1] >= cost.layout.pinned_layers
    ]
    assert found in allowed
    best = min(slowest(cost, seconds, layers) for layers in allowed)
    assert slowest(cost, seconds, found) == pytest.approx(best, rel=1e-12)
    assert best <= slowest(cost, seconds, cost.layout.layers)


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


def test_plans_judge_and_a_gain_below_the_models_truth_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = named_cost("llama3-8b", OLD_H100, pp=4, cp=8, logits_held=False)
    even = cost.layout.layers

    def found(others: float | None) -> RunChoice:
        """Even layers take a second, others so many."""

        def seconds(of: Cost, *_: object) -> float | None:
            return 1.0 if of.layout.layers == even else others

        monkeypatch.setattr(choice, "sketched_seconds", seconds)
        return run_choice(cost, [LENGTHS], Options(effort=0), "epp", placements=(EVENLY,))

    assert found(1 - PARTITION_PAYS / 2).way.layers == even
    assert found(1 - 2 * PARTITION_PAYS).way.layers != even
    made = found(None)
    assert made.way.layers == made.cost.layout.layers == even and made.gain == 0


def test_a_partition_by_plans_is_faster_by_plans() -> None:
    cost = named_cost("llama3-8b", OLD_H100, pp=4, cp=8, logits_held=False)
    found = run_choice(cost, [LENGTHS], Options(effort=0), "epp", placements=(EVENLY,))
    assert found.cost.layout.layers == found.way.layers and found.gain > 0.02
    assert found.seconds[found.way] == min(filter(None, found.seconds.values()))


def test_flags_are_megatrons() -> None:
    assert layout_flags((8, 8, 8)) == []
    assert layout_flags((9, 8, 8, 7)) == [
        *("--decoder-first-pipeline-num-layers", "9"),
        *("--decoder-last-pipeline-num-layers", "7"),
    ]
    assert layout_flags((9, 9, 8, 6)) == ["--pipeline-model-parallel-layout", "Et*9|t*9|t*8|t*6L"]
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
    name, depths = predicting("llama3-8b", 2, tmp_path), 2
    cost = named_cost(name, "h200-141g", pp=4, tp=8, memory_budget_gib=1e5)
    plain = named_cost("llama3-8b", "h200-141g", pp=4, tp=8, memory_budget_gib=1e5)
    assert (
        cost.layout.layers == (8, 8, 8, 10)
        and cost.layout.predictions == 3
        and cost.layout.pinned_layers == 3
    )
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
    with pytest.raises(ValueError, match="the last 2 are MTP layers, which lie on the last"):
        named_cost(name, "h200-141g", pp=2, layers=(32, 2))
