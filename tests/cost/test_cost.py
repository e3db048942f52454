"""The cost model against the published formulas, and against a slow sum over layers."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers, named_cost
from megatron_epp.cost.catalogue.devices import DEVICES, GIB
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads
from megatron_epp.cost.profile import LAYER_KIND, LayerCoefficients
from megatron_epp.ir import FULL, KEEP, OF_LAYERS, Chunk, Item, Kind, Plan, Span
from tests.cost.simple_device import SIMPLE
from tests.plans import plans

F, B, I, W = OF_LAYERS  # noqa: E741
GPT = ("gpt-7b", "gpt-13b", "gpt-30b")


def compute_seconds(cost: Cost, kind: Kind, load: Loads) -> np.ndarray:
    """[stages, chunks] without communication."""
    return cost.seconds.of(kind, load) - cost.seconds.communication(kind, load)


def loads(cost: Cost, *spans: tuple[int, int], length: int | None = None):
    """Chunks of one span each, of one document (or its whole)."""
    stop = max(s[1] for s in spans) if length is None else length
    return cost.loads([Chunk((Span(0, *span),)) for span in spans], [stop])


# --- the papers' formulas -------------------------------------------------------------------------


def simple(name: str, pp: int = 4, cp: int = 8, zero: int = 3, **how) -> Cost:
    """A cost whose layers take products, pairs, launches and communication alone."""
    made = profile(MODELS[name], SIMPLE, head_seconds=False, **how)
    return Cost(
        StageLayout(made, even_layers(MODELS[name].layers, pp), cp=cp, zero=zero), (1e15,) * pp
    )


def kept_bytes(name: str) -> float:
    """Of one token and layer from its F to its B."""
    return 2.0 * MODELS[name].shapes[LAYER_KIND].saved


@pytest.mark.parametrize("name", GPT)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 98_304), (30_000, 50_000)])
def test_equation_1(name: str, start: int, stop: int) -> None:
    """Forward plus backward of a slice on one device: a1 ((C + s)^2 - C^2) + a2 s, from flops."""
    shape, cost = MODELS[name], simple(name, 1, 1, 1)
    spans = ((0, start), (start, stop)) if start else ((0, stop),)
    load = loads(cost, *spans)
    seconds = sum(cost.seconds.of(kind, load)[0, -1] for kind in (F, B))
    layer = shape.shapes[LAYER_KIND]
    assert layer.flops_per_token == pytest.approx(24 * shape.hidden**2, rel=1e-3)  # norms
    tokens = 3 * layer.flops_per_token / SIMPLE.linear_flops * (stop - start)
    pairs = (stop * (stop + 1) - start * (start + 1)) / 2
    attention = (1 + 2.5) * 4 * shape.hidden / SIMPLE.attention_flops * pairs
    launches = 3 * SIMPLE.launch_seconds * layer.launches
    assert seconds == pytest.approx(shape.layers * (tokens + attention + launches), rel=1e-12)


@pytest.mark.parametrize("name", GPT)
def test_equation_3(name: str) -> None:
    """FlexSP's 4 * 2 * L * h * tokens * 2 bytes / SP / bandwidth, forward and backward."""
    cost = named_cost(name, "a100-80g", pp=4, cp=8)
    shape = MODELS[name]
    tokens = 10_000
    moved = 4 * 2 * shape.layers * shape.hidden * tokens * 2 / 8 / 96.5e9
    per_token = sum(cost.seconds.communication_per(kind)[:, 0].sum() for kind in (F, B))
    assert per_token * tokens == pytest.approx(moved, rel=1e-12)
    # Inside a node against across nodes; one device exchanges nothing.
    far = named_cost(name, "a100-80g", pp=4, cp=16)
    near_token, far_token = (c.seconds.communication_per(F)[0, 0] for c in (cost, far))
    assert far_token / near_token == pytest.approx(8 / 16 * 96.5 / 10.33, rel=1e-12)
    alone = named_cost(name, "a100-80g", pp=4, cp=1, memory_budget_gib=1000)
    assert alone.seconds.communication_per(F)[0, 0] == 0


def test_a_recomputed_layer_costs_its_forward() -> None:
    """Eq. 17: F_hat, all-to-all included, gathers not."""
    cost = simple("gpt-13b")
    load = loads(cost, (0, 30_000), (30_000, 50_000))
    forward = cost.seconds.of(F, load)[0] - cost.seconds.communication_per(F)[0, 2]
    assert cost.seconds.recompute((0, FULL), load) == pytest.approx(forward / 10, rel=1e-12)
    assert (cost.seconds.recompute((0, KEEP), load) == 0).all()


def test_memory_of_a_whole_document() -> None:
    """Eqs 5 and 10; the softmax of the logits on the last stage, in float32."""
    cost = named_cost("gpt-13b", "a100-80g", pp=4, cp=8)
    load = loads(cost, (0, 8000))
    layers = np.full((4, 1), 10.0)
    held = cost.memory.activation_bytes(load, {(0, KEEP): layers})[:, 0]
    layer_bytes = kept_bytes("gpt-13b") * 8000 / 8
    assert held[:3] == pytest.approx([10 * layer_bytes] * 3)
    assert held[3] == pytest.approx(10 * layer_bytes + 4 * 128_256 * 8000 / 8)
    # Besides in bf16: the logits in F, their gradient in B and I.
    for op, bytes_ in ((F, 2), (B, 2), (Kind.INPUT, 2), (Kind.WEIGHT, 0)):
        per_stage = cost.memory.workspace_bytes(op, load)[:, 0]
        assert per_stage == pytest.approx([0, 0, 0, bytes_ * 128_256 * 8000 / 8])
    # Recomputed in full, a layer keeps its input.
    held = cost.memory.activation_bytes(load, {(0, KEEP): layers - 4, (0, FULL): layers * 0 + 4})[
        :, 0
    ]
    assert held[0] == pytest.approx(6 * layer_bytes + 4 * 2 * 5120 * 8000 / 8)
    transient = named_cost("gpt-13b", "a100-80g", pp=4, cp=8, logits_held=False)
    held = transient.memory.activation_bytes(load, {(0, KEEP): layers})[:, 0]
    assert held[3] == held[0]
    assert transient.memory.workspace_bytes(F, load)[3, 0] == 6 * 128_256 * 8000 / 8


def test_memory_of_a_cut_document() -> None:
    """K and V of what later slices attend to once for the document; eqs 5 and 9 without the last
    slice, which needs neither, and without whole documents."""
    cost = named_cost("gpt-13b", "a100-80g", pp=4, cp=8)
    load = loads(cost, (0, 5000), (5000, 8000))
    layers = np.full((4, 2), 10.0)
    kv = 2 * 2 * 5120 / 8  # of one token and layer
    held = cost.memory.activation_bytes(load, {(0, KEEP): layers})[0]
    kept = kept_bytes("gpt-13b") / 8
    assert held == pytest.approx([10 * (kept - kv) * 5000, 10 * kept * 3000])
    assert cost.memory.kv_bytes(load)[0] == pytest.approx([10 * kv * 5000])
    assert cost.memory.kv_gradient_bytes(load)[0] == pytest.approx([20 * kv * 5000])  # float32
    # What is kept of a slice and its K/V is what a whole document keeps.
    whole = cost.memory.activation_bytes(loads(cost, (0, 8000)), {(0, KEEP): layers[:, :1]})[0, 0]
    assert held.sum() + cost.memory.kv_bytes(load)[0, 0] == pytest.approx(whole)
    # Checkpointing a split chunk cannot free its K and V: e (D + 2 D_kv) are left.
    full = (
        cost.memory.activation_bytes(load, {(0, FULL): layers})[0].sum()
        + cost.memory.kv_bytes(load)[0, 0]
    )
    assert full == pytest.approx(10 * 2 * (5120 * 8000 + 2 * 5120 * 5000) / 8)


def test_states() -> None:
    """16 bytes a parameter over the stage's devices and three gathered layers; Megatron's 6 + 12
    with embedding and output layer at the ends."""
    shape = MODELS["gpt-13b"]
    layer = shape.shapes[LAYER_KIND].parameters
    stage = 10 * layer
    buffers = 3 * 2 * layer
    zero3 = named_cost("gpt-13b", "a100-80g", pp=4, cp=8, zero=3).memory.states_bytes
    assert zero3[1] == math.ceil(16 * stage / 8 + buffers)
    ends = 16 * (stage + shape.vocabulary_parameters) / 8 + buffers
    assert zero3[0] == zero3[3] == math.ceil(ends)
    zero1 = named_cost("gpt-13b", "a100-80g", pp=4, cp=4, dp=2, tp=2, zero=1).memory.states_bytes
    assert zero1[1] == math.ceil(6 * stage / 2 + 12 * stage / 2 / 8)


def test_zero_1_gathers_nothing() -> None:
    for kind in OF_LAYERS:
        resident = named_cost("gpt-13b", "a100-80g", pp=4, cp=8, zero=1)
        assert (resident.seconds.communication_per(kind)[:, 2] == 0).all()
    resident = named_cost("gpt-7b", "a100-80g", pp=4, cp=8).layout
    assert resident.zero == 1 and str(resident).endswith("zero 1")
    spread = named_cost("gpt-7b", "a100-80g", pp=4, cp=8, zero=3).layout
    assert str(spread).endswith("zero 3, which --epp does not run")


def test_defaults_of_the_papers_world() -> None:
    cost = named_cost("gpt-13b", "a100-80g", pp=4, cp=8)
    assert cost.device_budget_bytes == (74 * GIB,) * 4
    assert cost.layout.devices == 32
    extra = cost.seconds.per(F)[3, 0] - cost.seconds.per(F)[0, 0]
    assert extra == pytest.approx(2 * 5120 * 128_256 / 212e12 / 8)
    assert cost.seconds.link(loads(cost, (0, 100)))[0] == pytest.approx(100 * 2 * 5120 / 50e9)
    how = {"head_seconds": False, "link_seconds": False}
    less = named_cost("gpt-13b", "a100-80g", pp=4, cp=8, **how)
    assert less.seconds.link(loads(less, (0, 100))).sum() == 0
    assert (less.seconds.per(F)[3] == less.seconds.per(F)[0]).all()  # no head


def test_even_layers() -> None:
    assert even_layers(40, 4) == (10, 10, 10, 10)
    assert even_layers(32, 6) == (6, 6, 5, 5, 5, 5)
    with pytest.raises(ValueError, match="pp 0: expected 1 to 32"):
        even_layers(32, 0)


# --- tables ---------------------------------------------------------------------------------------


def costs() -> st.SearchStrategy[Cost]:
    def make(name: str, on: str, zero: int, tp: int, cp: int, held: bool, host: float) -> Cost:
        made = profile(MODELS[name], DEVICES[on], logits_held=held)
        made = dataclasses.replace(made, host_bytes_per_second=host)
        return Cost(StageLayout(made, (1,), tp, cp, 1, zero), (1e12,))

    return st.builds(
        make,
        st.sampled_from(sorted(name for name in MODELS if len(MODELS[name].shapes) == 1)),
        st.sampled_from(sorted(DEVICES)),
        st.sampled_from((1, 3)),
        st.sampled_from((1, 2, 4)),
        st.sampled_from((1, 2, 8)),
        st.booleans(),
        st.sampled_from((1e6, 2e9, 40e9, 1e15)),
    )


def on_layers(cost: Cost, plan: Plan) -> Cost:
    return cost.replace(layers=plan.layers, device_budget_bytes=(1e12,) * plan.stages)


def issue(of: LayerCoefficients, kind: Kind) -> float:
    """What a layer's host takes, with all experts on one rank."""
    return of.host_seconds.get(kind, 0.0) + of.expert_host_seconds.get(kind, 0.0)


def recomputed(cost: Cost, choice: str, load: Loads, chunk: int, device: float) -> float:
    """What recompute adds to a backward of so many seconds on the device: the host issues those
    layers again, too, and the longer of both counts."""
    made = cost.layout.profile
    again = sum(cost.seconds.recompute((0, mode), load)[chunk] for mode in choice if mode != "o")
    issued = {"k": 0.0, "o": 0.0, "f": 1.15}
    more = sum(issued.get(mode, 0.4) for mode in choice) * issue(made, F)
    floor = len(choice) * issue(made, B)
    return max(device + again, floor + more) - max(device, floor)


@given(costs(), plans())
def test_a_table_is_a_sum_over_layers(cost: Cost, plan: Plan) -> None:
    """The vectorised grids against one call per layer."""
    cost = on_layers(cost, plan)
    table, load = cost.table(plan), cost.loads(plan.chunks, plan.documents)
    kept = tuple(tuple(KEEP * len(choice) for choice in stage) for stage in plan.recompute)
    plain = cost.table(dataclasses.replace(plan, recompute=kept))
    made, spread = cost.layout.profile, cost.layout.tp * cost.layout.cp
    cut = {
        (c, span.document): span.tokens
        for c, chunk in enumerate(plan.chunks)
        for span in chunk.spans
        if span.tokens < plan.documents[span.document]
    }
    for stage, layers in enumerate(plan.layers):
        for c, chunk in enumerate(plan.chunks):
            # K and V lie in the document's buffer, where the chunk is a slice with a successor.
            cut_tokens = sum(
                tokens
                for (at, document), tokens in cut.items()
                if at == c
                and tokens == chunk.tokens
                and chunk.spans[0].stop < plan.documents[document]
            )
            device: dict[Kind, float] = {}
            for kind in OF_LAYERS:
                seconds = layers * made.weight_seconds.get(kind, 0.0) / cost.layout.tp
                seconds += layers * made.expert_weight_seconds.get(kind, 0.0)
                parts = [made.layer_seconds[kind]] * layers
                parts += [made.first_seconds[kind]] * (stage == 0)
                parts += [made.last_seconds[kind]] * (stage == plan.stages - 1)
                for part in parts:
                    seconds += (
                        part.per_token * chunk.tokens + part.per_pair * chunk.pairs
                    ) / spread + part.per_chunk
                choice = plan.recompute[stage][c]
                device[kind] = seconds + plain.comm_seconds[kind][stage][c]
                floor = layers * issue(made, kind)
                seconds = alone = max(device[kind], floor)
                if kind in (B, I):
                    alone += recomputed(cost, choice, load, c, device[B])
                    assert table.recompute_seconds[stage][c] == pytest.approx(alone - seconds)
                if kind is not W:
                    saved = made.saved_bytes[KEEP](chunk.tokens, cut_tokens) / spread
                    copies = choice.count("o") * saved / made.host_bytes_per_second
                    exposed = max(0.0, copies - alone)
                    seconds += exposed
                    comm = table.comm_seconds[kind][stage][c] - plain.comm_seconds[kind][stage][c]
                    assert comm == pytest.approx(exposed, rel=1e-6, abs=1e-9 * seconds)
                assert table.seconds[kind][stage][c] == pytest.approx(seconds, rel=1e-9)
            held = sum(
                made.saved_bytes[letter](chunk.tokens, cut_tokens)
                for letter in plan.recompute[stage][c]
                if letter != "o"
            )
            held += made.first_bytes(chunk.tokens, cut_tokens) * (stage == 0)
            held += made.last_bytes(chunk.tokens, cut_tokens) * (stage == plan.stages - 1)
            activations = table.held_bytes[Item.ACTIVATIONS][stage][c]
            assert activations == pytest.approx(held / spread, rel=1e-9, abs=1.01)


def test_the_profiles_own_layout_scales() -> None:
    """A profile measured under tp 2 says the same under tp 2, and half of it on twice as many."""
    made = profile(MODELS["llama3-8b"], SIMPLE)
    measured = dataclasses.replace(made, tp=2)
    same = Cost(StageLayout(measured, (8,), tp=2), (1e12,))
    load = loads(same, (0, 4096))
    alone = Cost(StageLayout(made, (8,)), (1e12,)).seconds.of(
        F, load
    )  # on one device nothing is exchanged
    assert compute_seconds(same, F, load) == pytest.approx(alone)
    twice = Cost(StageLayout(measured, (8,), tp=2, cp=2), (1e12,))
    constant = 8 * made.layer_seconds[Kind.FORWARD].per_chunk
    assert compute_seconds(twice, F, load) - constant == pytest.approx((alone - constant) / 2)
