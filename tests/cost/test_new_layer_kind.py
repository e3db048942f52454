"""A kind of layer that carries a state and has a coefficient of its own: three classes, and it is
priced, fitted, planned for and named.

What carries such a state at run time is the store that keeps K and V, in
tests/layers/test_states.py: as many rows as there are borders, and as many of gradients.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import DEVICES, GIB
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.columns import Column
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.fit import Sample, fit_profile
from megatron_epp.cost.kinds import layer
from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes, Sublayer, Work
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import MEASURED, Profile, Provenance
from megatron_epp.ir import FULL, Chunk, Item, Kind, Span, check
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.sim.play import play
from tests.cost.simple_device import SIMPLE

HEADS, TAPS = 8, 3
SUM_KIND = "full-sum-dense"


@dataclass(frozen=True, slots=True)
class Blocks(Column):
    """Blocks of ``size`` rows that a scan goes through, one after the other."""

    NAME = "blocks"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        return -(-(stop - start) // self.size)


BLOCKS = Blocks(256)


@dataclass(frozen=True)
class SumSizes(Sizes):
    """sum_size: channels of a head of the state; 0: the layer has none."""

    sum_size: int = 0


class DecayedSum(Part):
    """A decaying sum over tokens behind a convolution over TAPS rows: input, sum, output."""

    MIXER, WORD, ALONE, COLUMNS = True, "sum", "sum", (Blocks,)

    @classmethod
    def there(cls, shape: Any) -> bool:
        return getattr(shape, "sum_size", 0) > 0

    @classmethod
    def of(cls, model: Any, shape: Any) -> Sublayer:
        hidden, inner = model.hidden, HEADS * shape.sum_size
        return Sublayer(
            parameters=2 * hidden * inner + inner + hidden,
            saved=2 * hidden + 2 * inner,
            weight_inputs=2 * hidden + 2 * inner,
            recomputed={"layernorm": RecomputedModule(hidden, light=True)},
            carried=CarryOver(heads=HEADS, tail=(TAPS - 1) * inner, state=inner),
            work={BLOCKS: Work(2.0 * BLOCKS.size * inner, backward=3.0)},
        )


@dataclass(frozen=True)
class ToyShape(LayerShape, SumSizes):
    """A shape that knows the toy's size."""


SUM, PLAIN = ToyShape(attention=False, sum_size=64), ToyShape()
# bf16 rows in front of the convolution, and a float32 state; their gradients in float32.
STATE_BYTES = HEADS * 64 * (2 * (TAPS - 1) + 4)
GRADIENT_BYTES = HEADS * 64 * (4 * (TAPS - 1) + 4)


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    monkeypatch.setattr(layer, "PARTS", (*layer.PARTS, DecayedSum))


def toy_model(layers: int = 8) -> Model:
    kinds = {"-".join(shape.words): shape for shape in (SUM, PLAIN)}
    assert list(kinds) == ["full-sum-dense", "full-heads-dense"]
    pattern = f"{layers // 4}*(3*full-sum-dense full-heads-dense)"
    return Model("toy", layers, 2048, 6144, 16, 4, 128, 128_256, gated=True, kinds=kinds,
                 pattern=pattern)  # fmt: skip


def toy_cost(pp: int = 2, room_gib: float = 20.0) -> Cost:
    model = toy_model()
    made = profile(model, SIMPLE, logits_held=False)
    cost = Cost(
        StageLayout(made, even_layers(8, pp), 2, 2, layer_kinds=model.layer_kinds), (1e15,) * pp
    )
    budget = tuple(states + room_gib * GIB for states in cost.memory.states_bytes)
    return cost.replace(device_budget_bytes=budget)


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_state_is_charged_by_border_whatever_the_tokens(scale: int, slices: int) -> None:
    """Nothing of a whole document; of a cut one a state at every border, in every layer."""
    cost, part = toy_cost(), 1000 * scale
    chunks = [Chunk((Span(0, n * part, (n + 1) * part),)) for n in range(slices)]
    loads = cost.loads(chunks, (slices * part,))
    boundaries, shards = slices - 1, cost.layout.tp * cost.layout.cp
    assert loads.boundaries.tolist() == [boundaries]
    attention = Cost(
        StageLayout(cost.layout.profile.of_kind("full-heads-dense"), (1,), 2, 2), (1e15,)
    )
    for found, of_attention, each in (
        (cost.memory.kv_bytes(loads), attention.memory.kv_bytes(loads), STATE_BYTES),
        (
            cost.memory.kv_gradient_bytes(loads),
            attention.memory.kv_gradient_bytes(loads),
            GRADIENT_BYTES,
        ),
    ):
        states = (
            3 * boundaries * each / shards
        )  # a stage has three such layers, and one of attention
        np.testing.assert_allclose(found - of_attention, states)
    assert (cost.seconds.of(Kind.FORWARD, loads) > 0).all()


def test_a_column_of_its_own_is_part_of_seconds() -> None:
    """And runs again with the whole layer; a column that no layer has is no column of the cost."""
    cost = toy_cost(pp=1)
    made = cost.layout.profile
    chunks = [Chunk((Span(0, 0, 300),)), Chunk((Span(0, 300, 1000), Span(1, 0, 257)))]
    loads, blocks = cost.loads(chunks, (1000, 257)), np.array([2, 3 + 2])
    assert (
        cost.layout.columns.extra == (BLOCKS,)
        and (cost.layout.columns.features(loads)[3] == blocks).all()
    )
    without = made.kinds | {SUM_KIND: dataclasses.replace(made.kinds[SUM_KIND], column_seconds={})}
    less = cost.replace(profile=made.with_kinds(without))
    assert less.layout.columns.extra == ()
    flops = 2.0 * BLOCKS.size * HEADS * 64
    for kind, times in ((Kind.FORWARD, 1), (Kind.BACKWARD, 3), (Kind.INPUT, 3), (Kind.WEIGHT, 0)):
        taken = times * flops / SIMPLE.linear_flops
        assert made.kinds[SUM_KIND].column_seconds[BLOCKS][kind] == pytest.approx(taken)
        more = cost.seconds.of(kind, loads)[0] - less.seconds.of(kind, loads)[0]
        np.testing.assert_allclose(more, 6 * taken * blocks / cost.layout.shards, atol=1e-12)
    number = cost.layout.kinds.names.index(SUM_KIND)
    again = cost.seconds.recompute((number, FULL), loads)
    again = again - less.seconds.recompute((number, FULL), loads)
    forward = made.kinds[SUM_KIND].column_seconds[BLOCKS][Kind.FORWARD]
    np.testing.assert_allclose(again, forward * blocks / cost.layout.shards, atol=1e-12)
    lengths = np.array([100, 1000, 257])
    assert cost.layout.columns.batch_features(lengths, 2.0).tolist()[2:] == [2.0, 1 + 4 + 2]


def test_a_column_of_its_own_is_fitted_and_kept_in_files() -> None:
    made = toy_cost().layout.profile.of_kind(SUM_KIND)
    value = json.loads(made.to_json())
    assert list(value["column_seconds"]) == ["blocks 256"] and value["context_seconds"] == {}
    assert Profile.from_json(made.to_json()) == made
    plain = MODELS["llama3-8b"]
    assert "column_seconds" not in json.loads(profile(plain, DEVICES["h100-80g"]).to_json())
    value["column_seconds"]["blocs 256"] = value["column_seconds"].pop("blocks 256")
    with pytest.raises(ValueError, match="column_seconds: 'blocs 256': no kind of layers has such"):
        Profile.from_json(json.dumps(value))
    rows = []
    for tokens, blocks in ((200, 1), (256, 9), (1000, 4), (1024, 30), (4000, 16), (4096, 50)) * 4:
        seconds = 2e-6 * tokens + 3e-3 * blocks + 1e-4
        columns = ((BLOCKS, blocks),)
        rows.append(Sample("k", False, 0, tokens, 0, 0, seconds, columns=columns))
    where = Provenance("toy", "h100-80g", "bf16", "2026-11-25", "the table above", MEASURED)
    fitted = fit_profile(made, where, seconds={Kind.FORWARD: rows}).profile
    assert fitted.column_seconds[BLOCKS][Kind.FORWARD] == pytest.approx(3e-3, rel=1e-3)
    assert fitted.layer_seconds[Kind.FORWARD].per_token == pytest.approx(2e-6, rel=1e-3)


def test_it_is_planned_for(tmp_path) -> None:
    cost = toy_cost(room_gib=6.0)
    assert cost.layout.kinds_text == "2*(3*full-sum-dense full-heads-dense)"
    lengths = (120_000, 9_000, 40_000, 700, 3_000)
    for name in ("epp", "infinipipe"):
        planned = PLANNERS[name](lengths, cost, Options())
        check(planned.plan)
        assert planned.fits
    boundaries = cost.loads(planned.plan.chunks, planned.plan.documents).boundaries
    assert boundaries.sum() > 0
    # Larger states, the same orders: the peak grows by no less than those of one document.
    figures = dict(cost.layout.profile.kinds)
    figures[SUM_KIND] = dataclasses.replace(figures[SUM_KIND], border_bytes=1e9)
    heavier = cost.replace(profile=cost.layout.profile.with_kinds(figures))
    light, heavy = (play(planned.plan, one.table(planned.plan)) for one in (cost, heavier))
    grown = np.array(heavy.peak_bytes) - np.array(light.peak_bytes)
    assert (grown > 0.9 * 3 * boundaries.max() * 1e9 / 4).all()
    path = str(tmp_path / "profile.json")
    cost.layout.profile.save(path)
    assert Profile.load(path) == cost.layout.profile


def test_its_states_are_items_of_documents() -> None:
    cost = toy_cost()
    plan = PLANNERS["epp"]((60_000, 500), cost, Options()).plan
    table, loads = cost.table(plan), cost.loads(plan.chunks, plan.documents)
    assert np.array_equal(table.held_bytes[Item.KV], cost.memory.kv_bytes(loads))


# --- what was forgotten ---------------------------------------------------------------------------

ANSWERS = {
    "MIXER": lambda part, has: isinstance(part.MIXER, bool),
    "WORD": lambda part, has: bool(part.WORD),
    "ALONE": lambda part, has: bool(part.ALONE),
    "parameters": lambda part, has: has.parameters > 0,
    "saved": lambda part, has: has.saved > 0,
    "weight_inputs": lambda part, has: has.weight_inputs > 0,
    # What stands in front of a layer no letter of the layer runs again.
    "recomputed": lambda part, has: part.BEFORE_LAYER or "layernorm" in has.recomputed,
    "carried": lambda part, has: not getattr(part, "MIXER", False) or has.carried != CarryOver(),
}


def forgotten(part: type[Part], has: Sublayer) -> list[str]:
    """The answers that a class owes and does not give."""

    def given(name: str) -> bool:
        return (not name.isupper() or hasattr(part, name)) and ANSWERS[name](part, has)

    return [name for name in ANSWERS if not given(name)]


SHAPES = (
    LayerShape(),
    LayerShape(window=100),
    LayerShape(kv_rank=64, rotary_size=16),
    LayerShape(kv_rank=64, carries_latents=False),
    LayerShape(kv_rank=64, index_heads=4, index_size=16, chosen_keys=32),
    LayerShape(experts=8, active_experts=2, expert_hidden=64),
    LayerShape(attention=False),
    LayerShape(mlp=False),
    LayerShape(predicts=True),
    LayerShape(attention=False, mamba_heads=8, state_groups=2, state_keys=16, state_values=4),
    LayerShape(attention=False, delta_heads=8, state_groups=2, state_keys=16, state_values=4),
    SUM,
)


def test_every_part_gives_its_answers() -> None:
    every = [
        each for shape in SHAPES for each in Layer.of(MODELS["llama3-8b"], shape).parts.items()
    ]
    assert {part for part, _ in every} == {*layer.PARTS}
    assert [(part, forgotten(part, has)) for part, has in every if forgotten(part, has)] == []


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_forgotten_is_named(answer: str, monkeypatch) -> None:
    has = DecayedSum.of(MODELS["llama3-8b"], SUM)
    if answer.isupper():
        monkeypatch.delattr(DecayedSum, answer)
    else:
        default = {"recomputed": {}, "carried": CarryOver()}.get(answer, 0)
        has = dataclasses.replace(has, **{answer: default})
    assert forgotten(DecayedSum, has) == [answer]
