"""Python calls of a layer: what a host does for a chunk, however fast it is."""

import copy
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron_epp.cost.halves import HOST_OF_HALVES
from megatron_epp.ir import Chunk, Kind, Op, Plan, Span, check
from megatron_epp.mcore.patching import emulated_engine

pytestmark = [
    pytest.mark.gpu,
    # A GPU's host runs compiled fusions besides, which make calls of their own.
    pytest.mark.skipif(
        not emulated_engine.is_wanted(), reason="counts with emulated kernels alone"
    ),
]

# Python's and C's, outside of Transformer Engine's compiled part, of a dense layer (RMSNorm,
# SwiGLU, rope, grouped keys). When they were first counted, a forward took 1842, a backward 584.
MOST_FORWARD, MOST_BACKWARD, MOST_WEIGHTS = 1080, 480, 265
# Of a layer of 128 experts (top-2, alltoall, on one rank); with a product for each expert, it took
# 10,500 and 9,650.
MOST_OF_EXPERTS = 1900, 850
EXPERTS = {
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
}
OF_HALVES = 1.6  # at most, with a chunk's rows in two halves, relative to the whole chunk
OF_THREE_PIECES = 1.3  # at most, in forwards of one
ENGINE = str(Path(__file__).parents[1] / "engine")
LAYERS = 2


class Calls:
    """A profiler that counts calls, but for those inside the emulated kernels."""

    def __init__(self):
        self.count = self._inside = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            code = frame.f_code
            kernel = event == "call" and ENGINE in code.co_filename
            if self._inside or (kernel and "_widen" not in code.co_qualname):
                self._inside += 1
            else:
                self.count += 1
        elif event in ("return", "c_return", "c_exception") and self._inside:
            self._inside -= 1

    @classmethod
    def of(cls, act: Callable[[], Any]) -> int:
        calls = cls()
        sys.setprofile(calls)
        try:
            act()
        finally:
            sys.setprofile(None)
        return calls.count


def counted(probe: Any, context: int, split: bool = False) -> tuple[int, int, int]:
    """Return the calls of all layers, forward, backward (I) and W, of a chunk whose kernels are
    known."""
    import torch

    from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
    from megatron_epp.mcore.calibrate.probe import Shape
    from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of

    shape, modes, deferred = Shape(64, context), "k" * LAYERS, DeferredWeightGrads()
    for _ in range(2):
        probe.layers(shape, modes, split=split)
    store, params = probe._chunk(shape, modes)
    hidden, rotary = probe._hidden(shape), probe._rotary(params)
    named = {"attention_mask": None, "rotary_pos_emb": rotary, "packed_seq_params": params}
    outputs = [hidden]

    def forward() -> None:
        for layer in layers_of(probe.model):
            outputs.append(layer(hidden_states=outputs[-1], **named)[0])

    with probe._deferring(deferred) if split else nullcontext():
        forwards = Calls.of(forward)
    probe._answer(store)
    gradient = torch.ones_like(outputs[-1])
    backwards = Calls.of(lambda: outputs[-1].backward(gradient))
    assert len(deferred) == (4 * LAYERS if split else 0)
    return forwards, backwards, Calls.of(deferred.accumulate_all)


def test_a_layer_takes_few_python_calls(alone, engine) -> None:
    from megatron_epp.mcore.calibrate.probe import undisturbed
    from scripts.bench.single_stage import build_stage, probe_alone

    model = build_stage(alone, LAYERS, False, False)
    with undisturbed(model):
        probe = probe_alone(alone, model)
        for context in (0, 128):
            forwards, backwards, _ = counted(probe, context)
            assert 0 < forwards <= MOST_FORWARD * LAYERS
            assert 0 < backwards <= MOST_BACKWARD * LAYERS
            *_, weights = counted(probe, context, split=True)
            assert 0 < weights <= MOST_WEIGHTS * LAYERS


def three_pieces() -> Plan:
    """slice | pack, slice, pack | slice: the slice in the middle begins above row 0."""
    chunks = (
        Chunk((Span(0, 0, 64),)),
        Chunk((Span(1, 0, 40), Span(2, 0, 24), Span(0, 64, 128), Span(3, 0, 14), Span(4, 0, 7))),
        Chunk((Span(0, 128, 192),)),
    )
    count = range(len(chunks))
    forwards = (Op(Kind.FORWARD, chunk) for chunk in count)
    plan = Plan(
        documents=(192, 40, 24, 14, 7),
        layers=(LAYERS,),
        chunks=chunks,
        recompute=(("k" * LAYERS,) * len(chunks),),
        orders=((*forwards, *(Op(Kind.BACKWARD, chunk) for chunk in reversed(count))),),
    )
    check(plan)
    return plan


def test_a_chunk_of_three_pieces_takes_few_calls_more(alone, engine, monkeypatch) -> None:
    """Where kernels are first called for rows above a chunk's first, and never for others."""
    from megatron.core.utils import unwrap_model

    from megatron_epp.layers.attention.te import TransformerEngineKernel
    from megatron_epp.layers.attention.varlen import VarlenAttention
    from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of
    from megatron_epp.runtime.memory_meter import NoMeter
    from scripts.bench import single_stage

    args = alone.args
    heads = args.num_attention_heads, args.num_query_groups
    kernel = TransformerEngineKernel(*heads, args.kv_channels, args.kv_channels**-0.5)
    kernel.use_top_left(True)
    fresh = replace(alone, attention=VarlenAttention(kernel))
    monkeypatch.setattr(single_stage, "SavedBytesMeter", lambda parameters: NoMeter())
    model, plan = single_stage.build_stage(fresh, LAYERS, True, True), three_pieces()
    single_stage.run_stage(fresh, model, plan, 0)
    counts: list[int] = []

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def of_layer(*inputs: Any, **named: Any) -> Any:
            outputs: list[Any] = []
            counts.append(Calls.of(lambda: outputs.append(forward(*inputs, **named))))
            return outputs[0]

        return of_layer

    for layer in layers_of(unwrap_model(model)):
        layer.forward = counted(layer.forward)
    single_stage.run_stage(fresh, model, plan, 0)
    one, three, last = (counts[chunk * LAYERS : (chunk + 1) * LAYERS] for chunk in range(3))
    assert sum(three) <= OF_THREE_PIECES * min(sum(one), sum(last)), counts


def of_experts(alone: Any, experts: int, halved_from: float = math.inf) -> tuple[int, int]:
    """Return the calls a layer, forward and backward, with ``experts`` experts on a rank."""
    from megatron_epp.mcore.calibrate.probe import undisturbed
    from megatron_epp.mcore.kinds.moe.router import halve_experts
    from scripts.bench.single_stage import build_stage, probe_alone

    args = copy.copy(alone.args)
    vars(args).update(EXPERTS, num_experts=experts)
    world = replace(alone, args=args)
    model = build_stage(world, LAYERS, False, False)
    halve_experts([model], halved_from)
    with undisturbed(model):
        forwards, backwards, _ = counted(probe_alone(world, model), 0)
    return forwards // LAYERS, backwards // LAYERS


def test_calls_do_not_grow_with_the_experts(alone, engine) -> None:
    few, many = of_experts(alone, 2), of_experts(alone, 128)
    assert 0 < many[0] <= MOST_OF_EXPERTS[0] and 0 < many[1] <= MOST_OF_EXPERTS[1], many
    assert all(more <= calls + 30 for calls, more in zip(few, many, strict=True)), (few, many)


def test_halves_take_few_calls_more(alone, engine) -> None:
    """As the cost model assumes (cost/halves.py)."""
    whole, halved = of_experts(alone, 128), of_experts(alone, 128, 0)
    assert HOST_OF_HALVES == OF_HALVES
    assert all(
        calls < more <= OF_HALVES * calls for calls, more in zip(whole, halved, strict=True)
    ), (whole, halved)
