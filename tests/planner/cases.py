"""Batches and machines for the planners' tests."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers, named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.profile import Seconds, layer_coefficients
from megatron_epp.ir import Kind, Plan
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import ChunkingParams, build_chunks
from megatron_epp.planner.evaluation import evaluation_plans
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import ChunkProblems, ScheduleProblem, loads_of, rates_of
from megatron_epp.planner.order.warmup import shrinking_in_flight

GIB = 2**30
# Long enough to be cut, short enough to be packed; some equal, some of a single token.
LENGTHS = st.lists(
    st.one_of(st.integers(1, 300), st.integers(300, 5_000), st.integers(5_000, 40_000)),
    min_size=1,
    max_size=24,
)
# Beside the model states. The tightest make recompute necessary, the loosest never.
ROOMS_GIB = (1.5, 3.0, 8.0, 60.0)


SHAPES = {
    "dense": LayerShape(),
    "window": LayerShape(window=1000),
    "experts": LayerShape(experts=16, active_experts=2, expert_hidden=1024, shared_hidden=512),
    "latents": LayerShape(kv_rank=256, query_rank=512, rotary_size=64),
    "expanded": LayerShape(kv_rank=256, rotary_size=64),
    "attention": LayerShape(mlp=False),
    "mlp": LayerShape(attention=False),
}


def mixed_model(pattern: str, layers: int) -> Model:
    used = set(pattern.replace("*", " ").replace("(", " ").replace(")", " ").split())
    kinds = {kind: shape for kind, shape in SHAPES.items() if kind in used}
    return Model(
        "mixed", layers, 2048, 6144, 16, 4, 128, 128_256, gated=True, kinds=kinds, pattern=pattern
    )


def mixture(pattern: str, layers: int, pp: int, room_gib: float = 60.0, **how: Any) -> Cost:
    """A model of that pattern of kinds on ``pp`` stages of 8 devices, with ``room_gib`` for all but
    the model states."""
    model, on = mixed_model(pattern, layers), DEVICES["h100-80g"]
    made = profile(model, on, **how)
    kinds = model.layer_kinds if len(made.kinds) > 1 else ()
    cost = Cost(StageLayout(made, even_layers(layers, pp), 2, 4, 1, 1, 8, kinds), (1e15,) * pp)
    return with_room(cost, room_gib)


@st.composite
def mixtures(draw: st.DrawFn) -> Cost:
    layers = draw(st.integers(5, 14))
    word = draw(st.lists(st.sampled_from(sorted(SHAPES)), min_size=layers, max_size=layers))
    return mixture(
        " ".join(word), layers, draw(st.integers(1, 5)), draw(st.sampled_from(ROOMS_GIB))
    )


@st.composite
def machines(draw: st.DrawFn) -> Cost:
    if draw(st.booleans()):
        return draw(mixtures())
    cost = named_cost(
        "gpt-7b",
        "a100-80g",
        pp=draw(st.integers(1, 5)),
        cp=8,
        link_seconds=draw(st.booleans()),
        head_seconds=draw(st.booleans()),
    )
    cost = cost.with_vocabulary(cost.layout.stages > 1 and draw(st.booleans()))
    return with_room(cost, draw(st.sampled_from(ROOMS_GIB)))


def machine(pp: int = 4, room_gib: float = 60.0, zero: int = 3, **how: Any) -> Cost:
    """GPT-7B on ``pp`` stages of 8 devices, with ``room_gib`` for all but the model states."""
    return with_room(named_cost("gpt-7b", "a100-80g", pp=pp, cp=8, zero=zero, **how), room_gib)


def with_room(cost: Cost, room_gib: float) -> Cost:
    budget = tuple(states + room_gib * GIB for states in cost.memory.states_bytes)
    return cost.replace(device_budget_bytes=budget)


def priced(cost: Cost, price: float) -> Cost:
    """``cost`` where I and W of a layer together take ``price`` more than B, as a share of it;
    neither the host nor tensor-parallel groups take time."""
    kinds = {}
    for kind, each in cost.layout.profile.kinds.items():
        of = dict(each.layer_seconds)
        whole, weight = of[Kind.BACKWARD] * (1 + price), of[Kind.WEIGHT]
        of[Kind.INPUT] = Seconds(
            max(0.0, whole.per_token - weight.per_token),
            whole.per_pair,
            max(0.0, whole.per_chunk - weight.per_chunk),
        )
        kinds[kind] = dataclasses.replace(layer_coefficients(each), layer_seconds=of)
    free = {"host_seconds": {}, "tensor_bytes_per_token": 0.0}
    return cost.replace(profile=cost.layout.profile.with_kinds(kinds).each_kind(**free))


class Prepared(NamedTuple):
    """A batch in chunks of about equal time, and all that a scheduler wants to know of it."""

    batch: SortedBatch
    chunking: Chunking
    loads: Loads
    work: ScheduleProblem
    limit: np.ndarray


def prepared(
    cost: Cost, lengths: list[int], chunks: float | ChunkingParams, counts: Counts | None = None
) -> Prepared:
    params = chunks if isinstance(chunks, ChunkingParams) else ChunkingParams(chunks)
    batch = SortedBatch.of(lengths)
    chunking = build_chunks(params, batch.lengths, rates_of(cost), 10**9)
    loads = loads_of(chunking, batch.lengths)
    work = ChunkProblems(cost, chunking, loads).of(counts or {})
    limit = shrinking_in_flight(chunking.sizes, cost.layout.stages)
    return Prepared(batch, chunking, loads, work, limit)


def evaluation_plan(lengths: Sequence[int], cost: Cost) -> Plan:
    """The forward-only plan of one replica."""
    return evaluation_plans(lengths, cost, Options())[1][0]
