"""An op takes at least what the host needs to issue it."""

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES, device_like
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, OF_LAYERS, Chunk, Kind, Span
from megatron_epp.planner.choose.slow_hosts import with_hosts
from megatron_epp.planner.stock import candidates

H100 = DEVICES["h100-80g"]
PROFILE = profile(MODELS["llama3-8b"], H100)
FORWARD, BACKWARD = H100.host_forward_seconds, H100.host_backward_seconds


# One of the stages in between: nothing but layers is on it.
STAGE, LAYERS = 1, 8


def middle(**layout: int) -> Cost:
    return named_cost("llama3-8b", "h100-80g", pp=4, **layout)


def loads(cost: Cost, tokens: int) -> Loads:
    return cost.loads([Chunk((Span(0, 0, tokens),))], [tokens])


def forward(cost: Cost, tokens: int) -> float:
    return float(cost.seconds.of(Kind.FORWARD, loads(cost, tokens))[STAGE, 0])


def test_small_chunks_take_the_hosts_time_and_large_ones_the_devices() -> None:
    cost = middle()
    assert forward(cost, 64) == forward(cost, 512) == pytest.approx(LAYERS * FORWARD)
    device = cost.seconds.per(Kind.FORWARD) @ cost.layout.columns.features(loads(cost, 16384))
    assert forward(cost, 16384) == device[STAGE, 0] > LAYERS * FORWARD
    # About 2,560 tokens of a layer of these sizes were measured to take as long as the host.
    more = (n for n in range(256, 8192, 64) if forward(cost, n) > 1.0001 * LAYERS * FORWARD)
    assert 2000 < next(more) < 4000


def test_more_devices_do_not_speed_the_host_up() -> None:
    alone, parted = middle(), middle(tp=4, cp=2)
    for kind in OF_LAYERS:
        assert alone.seconds.host[kind] == pytest.approx(parted.seconds.host[kind])
    assert forward(parted, 4096) == pytest.approx(LAYERS * FORWARD)


@pytest.mark.parametrize(("ep", "more"), [(1, 0.3), (8, 0.3), (32, 0.034 * 128 / 32)])
def test_one_product_of_all_experts_takes_a_constant(ep: int, more: float) -> None:
    """But not more than the products of few experts, each by itself."""
    cost = named_cost("qwen3-30b-a3b", "h100-80g", pp=4, tp=8, dp=4, ep=ep, stacked_experts=True)
    host = {kind: cost.seconds.host[kind][STAGE] / cost.layout.layers[STAGE] for kind in OF_LAYERS}
    assert host[Kind.FORWARD] == pytest.approx(FORWARD * (1 + more))
    assert host[Kind.BACKWARD] == pytest.approx(BACKWARD * (1 + more))
    stock = next(candidates(cost, [[4096]]))
    apart = FORWARD * (1 + 0.034 * 128 / ep) * stock.cost.layout.layers[STAGE]
    assert stock.cost.seconds.host[Kind.FORWARD][STAGE] == pytest.approx(apart)


@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_the_gradients_of_a_ranks_experts_exist_while_b_and_i_run(dispatcher: str) -> None:
    """Those of the first linear, which is the larger one, of 16 experts on a rank, in bf16."""
    named = {"pp": 4, "tp": 8, "ep": 8, "moe_token_dispatcher_type": dispatcher}
    cost, apart = (
        named_cost("qwen3-30b-a3b", "h100-80g", stacked_experts=stacked, **named)
        for stacked in (True, False)
    )
    there = (Kind.BACKWARD, Kind.INPUT) if dispatcher == "alltoall" else ()
    for kind in OF_LAYERS:
        with_it, without = (
            of.memory.workspace_bytes(kind, loads(of, 4096))[STAGE, 0] for of in (cost, apart)
        )
        assert with_it - without == (2 * 16 * 2 * 768 * 2048 if kind in there else 0)


@pytest.mark.parametrize("ep", [1, 4, 8])
def test_a_host_issues_the_products_of_its_own_experts(ep: int) -> None:
    """With all 128 on one rank, F took 4.7 times as long as a dense layer's, and B 6.1 times."""
    cost = named_cost("qwen3-30b-a3b", "h100-80g", pp=4, tp=8, ep=ep)
    host = {kind: cost.seconds.host[kind][STAGE] / cost.layout.layers[STAGE] for kind in OF_LAYERS}
    assert host[Kind.FORWARD] == pytest.approx(FORWARD * (1 + 0.034 * 128 / ep))
    assert host[Kind.BACKWARD] == pytest.approx(BACKWARD * (1 + 0.034 * 128 / ep))
    if ep == 1:
        assert 4.7 < host[Kind.FORWARD] / FORWARD < 6.1
    twice = with_hosts(cost, 2.0).seconds.host[Kind.FORWARD][STAGE]
    assert twice == pytest.approx(2 * cost.seconds.host[Kind.FORWARD][STAGE])


def test_recompute_of_a_small_chunk_takes_the_host_as_long_as_was_measured() -> None:
    """4.1 ms of a layer's backward with, and 1.65 ms without."""
    cost = middle()
    load = loads(cost, 256)
    again = cost.seconds.recompute((0, FULL), load)
    counts = {(0, FULL): np.full((4, 1), float(LAYERS))}
    device = cost.seconds.device(Kind.BACKWARD, load)
    host = cost.seconds.host_of(Kind.BACKWARD, load)
    added = cost.seconds.exposed_recompute(counts, np.tile(LAYERS * again, (4, 1)), device, host)
    alone = cost.seconds.of(Kind.BACKWARD, load)[STAGE, 0]
    assert alone == pytest.approx(LAYERS * BACKWARD)
    assert alone + added[STAGE, 0] == pytest.approx(LAYERS * 4.1e-3, rel=0.03)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA GB200", "gb200-186g"),
        ("NVIDIA H800", "h800-80g"),
        ("cpu", "cpu"),
        ("cpu: Some H100, 4 threads a rank", None),
        ("Tesla V100", None),
    ],
)
def test_torchs_names_of_devices(text: str, name: str | None) -> None:
    found = device_like(text)
    assert (found and found.name) == name


def test_kernels_of_dense_layers_start_and_end() -> None:
    """In every chunk, however small; a layer of experts has its own constant."""
    tail, launch = H100.tail_seconds, H100.launch_seconds
    dense = PROFILE.layer_seconds
    assert dense[Kind.FORWARD].per_chunk == pytest.approx(launch + tail)
    assert dense[Kind.BACKWARD].per_chunk == pytest.approx(2 * launch + tail / 2)
    halves = dense[Kind.INPUT].per_chunk + dense[Kind.WEIGHT].per_chunk
    assert halves == pytest.approx(dense[Kind.BACKWARD].per_chunk)
    experts = profile(MODELS["qwen3-30b-a3b"], H100).layer_seconds
    assert experts[Kind.FORWARD].per_chunk == pytest.approx(5 * launch)
    assert profile(MODELS["llama3-8b"], DEVICES["b200-180g"]).layer_seconds[
        Kind.FORWARD
    ].per_chunk == pytest.approx(launch)
