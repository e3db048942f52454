"""Experts in two halves of rows: what they hide, from how many tokens, for whom."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.communication import expert_seconds
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.halves import HOST_OF_HALVES, OVERLAP_SLOWDOWN
from megatron_epp.cost.overlap import overlapped
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import FULL, Chunk, Kind, Span
from megatron_epp.planner.lower_bound import lower_bound_seconds

F, B = Kind.FORWARD, Kind.BACKWARD


def cost_of(stacked: bool = True, **changes: object) -> Cost:
    named = {"pp": 4, "dp": 8, "ep": 8, "topology": "nodes", "stacked_experts": stacked}
    return named_cost("qwen3-30b-a3b", "h100-80g", **named | changes)


def loads(cost: Cost, *tokens: int):
    chunks = [Chunk((Span(number, 0, count),)) for number, count in enumerate(tokens)]
    return cost.loads(chunks, tokens)


def test_half_of_an_exchange_is_hidden_beside_products() -> None:
    halved, whole = cost_of(), cost_of(stacked=False)
    least = halved.seconds.halved_from
    assert 1000 < least < 20_000 and whole.seconds.halved_from == np.inf
    load = loads(halved, int(least) - 1, 32768)
    layer = halved.layout.coefficients[0]
    exchange = 32768 * expert_seconds(halved.layout, layer)
    count = halved.layout.layers[0]
    for kind in (F, B):
        small, large = (whole.seconds.device(kind, load) - halved.seconds.device(kind, load))[0]
        again = layer.expert_weight_seconds[kind] / 8
        assert small == 0
        assert large == pytest.approx(count * (exchange / 2 / OVERLAP_SLOWDOWN - again))
        less = whole.seconds.communication(kind, load) - halved.seconds.communication(kind, load)
        assert less[0] == pytest.approx([0.0, count * exchange / 2 / OVERLAP_SLOWDOWN])
    full = (0, FULL)
    again = whole.seconds.recompute(full, load) - halved.seconds.recompute(full, load)
    expected = exchange / 2 / OVERLAP_SLOWDOWN - layer.expert_weight_seconds[F] / 8
    assert again == pytest.approx([0.0, expected])


def test_no_more_is_hidden_than_the_products_take() -> None:
    """Over several nodes, forward's products take less than half of the exchange."""
    cost = cost_of(ep=16, dp=16)
    layer = cost.layout.coefficients[0]
    assert expert_seconds(cost.layout, layer) / 2 / OVERLAP_SLOWDOWN > layer.expert_seconds[F]
    hidden = cost.seconds.hidden_per_token[F][0] / cost.layout.layers[0]
    assert hidden == pytest.approx(layer.expert_seconds[F])


def test_a_host_issues_more_so_small_chunks_stay_whole() -> None:
    cost = cost_of()
    load = loads(cost, 32768, 128)
    for kind in (F, B):
        large, small = cost.seconds.host_of(kind, load)[0]
        assert large == pytest.approx(HOST_OF_HALVES * small)
        assert small == pytest.approx(cost.seconds.host[kind][0])
    slow = cost.layout.coefficients[0]
    hosts = {kind: 20 * seconds for kind, seconds in slow.host_seconds.items()}
    profile = dataclasses.replace(cost.layout.profile, host_seconds=hosts)
    assert cost.replace(profile=profile).seconds.halved_from > 2 * cost.seconds.halved_from


@pytest.mark.parametrize("changes", [{"ep": 1}, {"moe_token_dispatcher_type": "flex"}])
def test_others_stay_whole(changes) -> None:
    assert cost_of(**changes).seconds.halved_from == np.inf


def test_stock_hides_its_own_fraction_alone() -> None:
    stock = overlapped(cost_of(stacked=False))
    assert stock.seconds.halved_from == np.inf


def test_bounds_count_what_halves_hide() -> None:
    """On one stage, a plan without idle time takes what its chunks take."""
    cost, tokens = cost_of(pp=1, dp=64), [32768] * 8
    load = loads(cost, *tokens)
    work = float(sum(cost.seconds.of(kind, load).sum() for kind in (F, B)))
    assert 0.9 * work < lower_bound_seconds(np.array(tokens), cost) <= work


def test_profiles_of_before_have_no_halves(tmp_path: Path) -> None:
    profile, file = cost_of().layout.profile, tmp_path / "profile.json"
    profile.save(str(file))
    assert Profile.load(str(file)).expert_seconds == profile.expert_seconds
    value = json.loads(file.read_text())
    del value["expert_seconds"]
    file.write_text(json.dumps(value))
    old = cost_of().replace(profile=Profile.load(str(file)))
    assert old.seconds.halved_from == np.inf
