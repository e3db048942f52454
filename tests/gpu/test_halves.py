"""Experts in two halves of rows: the same numbers as whole, exchanges beside products, faults."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_epp.cost import halves as cost_of_halves
from megatron_epp.ir import Kind

pytestmark = pytest.mark.gpu

MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
}
ROWS = 64


@pytest.fixture(scope="module")
def stage(in_float64) -> Any:
    """(its world, a stage of one MoE layer in float64, whose group of experts is one rank)."""
    import torch

    from scripts.bench.single_stage import build_stage

    args = copy.copy(in_float64.args)
    vars(args).update(MOE)
    world = replace(in_float64, args=args)
    torch.manual_seed(3)
    return world, build_stage(world, 1, False, False)


def moe_of(stage: Any) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(stage[1]).decoder.layers[0].mlp


@contextmanager
def halved(stage: Any, tokens: float = 0) -> Iterator[None]:
    from megatron_epp.mcore.kinds.moe.halves import set_halved_from

    set_halved_from(moe_of(stage), tokens)
    try:
        yield
    finally:
        set_halved_from(moe_of(stage), float("inf"))


def computed(
    stage: Any, mode: str = "k", rows: int = ROWS, between: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Return output and gradients of a chunk; call ``between`` after its forward."""
    import torch

    from megatron_epp.mcore.calibrate.probe import Shape, undisturbed
    from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of
    from scripts.bench.single_stage import probe_alone

    world, model = stage
    with undisturbed(model):
        probe = probe_alone(world, model)
        (layer,) = layers_of(probe.model)
        shape = Shape(rows)
        store, params = probe._chunk(shape, mode)
        hidden, rotary = probe._hidden(shape), probe._rotary(params)
        named = {"attention_mask": None, "rotary_pos_emb": rotary, "packed_seq_params": params}
        output = layer(hidden_states=hidden, **named)[0]
        between()
        answer = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        probe._answer(store)
        output.backward(answer)
        gradients = {name: weight.main_grad for name, weight in model.named_parameters()}
        tensors = {"output": output, "hidden": hidden.grad, **gradients}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def largest_error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of a tensor's element over the tensor's largest element."""
    assert found.keys() == expected.keys()
    return max(
        float(((found[name] - tensor) / (tensor.abs().max() or 1.0)).abs().max().nan_to_num(1.0))
        for name, tensor in expected.items()
    )


@pytest.fixture(scope="module")
def whole(stage) -> dict[str, Any]:
    return computed(stage)


@pytest.mark.parametrize("mode", ["k", "f", "m", "n", "b", "e"])
def test_halves_compute_what_the_whole_chunk_computes(stage, whole, mode) -> None:
    """With any module recomputed; of several ranks see tests/mcore/test_lockstep.py."""
    with halved(stage):
        assert largest_error(computed(stage, mode), whole) < 1e-12


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_half_may_be_empty(stage, rows) -> None:
    """Its exchanges are those of any half, in the same order."""
    expected = computed(stage, rows=rows)
    with halved(stage), exchanged() as order:
        assert largest_error(computed(stage, rows=rows), expected) < 1e-12
    assert [what for what, _ in order] == ORDER + BACK


def test_small_chunks_stay_whole(stage) -> None:
    with halved(stage, ROWS), exchanged() as order:
        computed(stage, rows=ROWS - 16)
        assert not order
        computed(stage, rows=ROWS)
        assert order


# ------------------------------------------------------------------ order and time


class Network:
    """A stand-in for a process group of one rank, on a clock of its own, without real seconds.

    One exchange runs at a time. An exchange of rows takes ``seconds``, one of routing weights none.
    Its tensor arrives when its handle is waited for.
    """

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.now, self.free = seconds, 0.0, 0.0
        self.order: list[tuple[str, int]] = []

    def all_to_all_single(
        self, buffer: Any, tensor: Any, received: Any, sent: Any, group: Any, async_op: bool
    ) -> Any:
        assert async_op and sum(received) == len(buffer) and sum(sent) == len(tensor)
        self.order.append(("rows" if tensor.dim() > 1 else "weights", len(tensor)))
        self.free = max(self.now, self.free) + (self.seconds if tensor.dim() > 1 else 0.0)
        done, contents = self.free, tensor.clone()
        buffer.fill_(float("nan"))

        def wait() -> None:
            self.now = max(self.now, done)
            buffer.copy_(contents)

        return SimpleNamespace(wait=wait)


@contextmanager
def on(network: Network) -> Iterator[None]:
    from megatron_epp.layers.moe import async_exchange

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_exchange, "dist", network)
        yield


@contextmanager
def exchanged() -> Iterator[list[tuple[str, int]]]:
    network = Network()
    with on(network):
        yield network.order


# dispatch 1, dispatch 2, combine 1, combine 2
ORDER = ["rows", "weights", "rows", "weights", "rows", "rows"]
BACK = ["rows", "rows", "rows", "weights", "rows", "weights"]


@pytest.mark.parametrize("mode", ["k", "e"])
def test_exchanges_have_one_order(stage, whole, mode) -> None:
    with halved(stage), exchanged() as order:
        assert largest_error(computed(stage, mode), whole) < 1e-12
    half = ROWS // 2 * MOE["moe_router_topk"]
    assert order == [(what, half) for what in ORDER + BACK]


@contextmanager
def experts_take(stage: Any, network: Network, seconds: float) -> Iterator[None]:
    """Spend ``seconds`` on the network's clock for all rows, in forward and again in backward."""
    experts = moe_of(stage).experts
    forward = experts.forward

    def work(rows: Any, *inputs: Any) -> Any:
        share = seconds * len(rows) / (ROWS * MOE["moe_router_topk"])

        def spend(gradient: Any) -> Any:
            network.now += share
            return gradient

        network.now += share
        output, bias = forward(rows, *inputs)
        output.register_hook(spend)
        return output, bias

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "forward", work)
        yield


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_a_layer_takes_what_the_cost_model_says(stage, monkeypatch, ratio) -> None:
    """Experts take ``ratio`` times as long as the exchanges of all rows."""
    exchange, products = 0.4, 0.4 * ratio
    network = Network(exchange / 4)
    between: list[float] = []
    with halved(stage), on(network), experts_take(stage, network, products):
        computed(stage, between=lambda: between.append(network.now))
    monkeypatch.setattr(cost_of_halves, "OVERLAP_SLOWDOWN", 1.0)
    monkeypatch.setattr(cost_of_halves, "expert_seconds", lambda layout, of: exchange)
    layout = SimpleNamespace(stacked_experts=True, shards=1)
    for kind, taken in zip(
        (Kind.FORWARD, Kind.BACKWARD), (between[0], network.now - between[0]), strict=True
    ):
        of = SimpleNamespace(expert_seconds={kind: products})
        hidden = cost_of_halves.hidden_seconds(layout, of, kind)
        assert hidden > 0
        assert taken == pytest.approx(exchange + products - hidden, rel=0.05)


def test_a_job_times_whole_chunks_beside_halves(stage) -> None:
    """A whole chunk's exchanges do not go through the network, whose clock stands still."""
    from functools import partial

    from megatron_epp.mcore.calibrate.clocks import WallClock
    from megatron_epp.mcore.calibrate.path_seconds import timed_paths
    from megatron_epp.mcore.calibrate.probe import Shape, undisturbed
    from megatron_epp.mcore.kinds.moe.halves import set_halved_from
    from scripts.bench.single_stage import probe_alone

    world, model = stage
    network, inf = Network(0.1), float("inf")
    paths = [partial(set_halved_from, moe_of(stage), least) for least in (inf, 0)]
    with halved(stage), undisturbed(model), on(network), experts_take(stage, network, 0.8):
        probe = probe_alone(world, model).timed_by(WallClock(lambda: network.now))
        whole, halves = timed_paths(probe, paths, Shape(ROWS))
    assert whole == pytest.approx(2 * 0.8)
    assert halves == pytest.approx(2 * (0.8 + 0.2))  # the first dispatch, the last combine


# As a rank, and a slower one, measure a layer, whole and in halves.
@pytest.mark.parametrize(
    ("own", "slowest", "said"),
    [
        ([2.0, 1.0], [3.0, 2.0], "of 500 tokens or more in two halves of rows (2000.00 ms a"),
        ([2.0, 1.0], [2.0, 2.5], "stay whole, because of the time of halves (2500.00 ms a layer"),
        (None, [], "of 500 tokens or more in two halves of rows"),
    ],
)
def test_the_slowest_rank_decides(stage, monkeypatch, own, slowest, said) -> None:
    from megatron_epp.mcore.kinds.base import ChosenBy
    from megatron_epp.mcore.kinds.moe import choose_halves

    args = copy.copy(stage[0].args)
    vars(args).update(expert_model_parallel_size=2, seq_length=4096)
    cost = SimpleNamespace(seconds=SimpleNamespace(halved_from=500.0))
    of_ranks = iter([[0.0, 500.0], slowest])
    monkeypatch.setattr(choose_halves, "largest", lambda values, group: next(of_ranks))
    monkeypatch.setattr(choose_halves, "stacks_of", lambda layer: [layer])
    timed: list[int] = []

    def seconds(model: Any, at: int, paths: Any, tokens: int) -> list[float]:
        timed.append(tokens)
        return own

    with halved(stage):
        chosen_by = ChosenBy(args, lambda: cost, seconds if own else None, None)
        line = choose_halves.choose_halves([stage[1]], chosen_by)
        assert said in line and timed == [2000] * bool(own)
        with exchanged() as order:
            computed(stage, rows=600)
            assert bool(order) == ("stay whole" not in line)
    tokens = map(choose_halves.timed_tokens, (0.0, 500.0, 3000.0, 5000.0), [4096] * 4)
    assert list(tokens) == [1, 2000, 4096, 0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_token_dispatcher_type": "flex"}, "token dispatcher flex"),
        ({"moe_token_dispatcher_type": "allgather"}, "token dispatcher allgather"),
        ({"expert_tensor_parallel_size": 2}, "expert tensor parallelism"),
        ({"moe_router_padding_for_quantization": True}, "row counts padded for fp8 or fp4"),
        ({}, "a product for each expert"),  # of the layer: its weights are not stacked
    ],
)
def test_what_keeps_chunks_whole_is_said_in_one_line(stage, monkeypatch, changes, reason) -> None:
    from megatron_epp.mcore.kinds.base import ChosenBy
    from megatron_epp.mcore.kinds.moe import choose_halves

    args = copy.copy(stage[0].args)
    vars(args).update({"expert_model_parallel_size": 2, **changes})
    cost = SimpleNamespace(seconds=SimpleNamespace(halved_from=0.0))
    monkeypatch.setattr(choose_halves, "largest", lambda values, group: values)
    monkeypatch.setattr(choose_halves, "stacks_of", lambda layer: [layer] * bool(changes))
    with halved(stage):
        line = choose_halves.choose_halves([stage[1]], ChosenBy(args, lambda: cost, None, None))
        assert line == f"experts: chunks stay whole, because of {reason}"
        with exchanged() as order:
            computed(stage)
            assert not order


# ------------------------------------------------------------------ faults


def swap_halves(patch: pytest.MonkeyPatch) -> None:
    import torch

    cat = torch.cat

    def swapped(tensors: Any, *args: Any, **named: Any) -> Any:
        inside = sys._getframe(1).f_code.co_name == "in_halves"
        return cat(tensors[::-1] if inside else tensors, *args, **named)

    patch.setattr(torch, "cat", swapped)


def count_the_other_half(patch: pytest.MonkeyPatch) -> None:
    from megatron_epp.mcore.kinds.moe.halves import _RowCounts

    begin = _RowCounts.__init__

    def swapped(self: Any, *args: Any) -> None:
        begin(self, *args)
        self.of_experts_hL = self.of_experts_hL.flip(0)

    patch.setattr(_RowCounts, "__init__", swapped)


def wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    from megatron_epp.layers.moe.async_exchange import AsyncExchange

    patch.setattr(AsyncExchange, "finish", lambda exchange: exchange._in_flight.clear())


def wait_for_no_gradient(patch: pytest.MonkeyPatch) -> None:
    from megatron_epp.layers.moe.async_exchange import AsyncExchange

    finish = AsyncExchange.finish

    def forward_only(exchange: AsyncExchange) -> None:
        if exchange.gradients:
            exchange._in_flight.clear()
        finish(exchange)

    patch.setattr(AsyncExchange, "finish", forward_only)


@pytest.mark.parametrize(
    "break_it", [swap_halves, count_the_other_half, wait_for_nothing, wait_for_no_gradient]
)
def test_faults_show(stage, whole, break_it) -> None:
    with halved(stage), exchanged(), pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        assert largest_error(computed(stage), whole) > 1e-6
