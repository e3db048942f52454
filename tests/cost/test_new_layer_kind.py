"""A kind of layer that carries a state: two classes, and it is priced, planned for and named.

What carries such a state at run time is the store that keeps K and V, in
tests/layers/test_carried_states.py: as many rows as there are borders, and as many of gradients.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import DEVICES, GIB
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.kinds import layer
from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Chunk, Item, Kind, Span, check
from megatron_epp.planner import PLANNERS, Options
from megatron_epp.sim.play import play

HEADS, TAPS = 8, 3


@dataclass(frozen=True)
class SumSizes(Sizes):
    """sum_size: channels of a head of the state; 0: the layer has none."""

    sum_size: int = 0


class DecayedSum(Part):
    """A decaying sum over tokens behind a convolution over TAPS rows: input, sum, output."""

    MIXER, WORD, ALONE = True, "sum", "sum"

    @classmethod
    def there(cls, shape: Any) -> bool:
        return getattr(shape, "sum_size", 0) > 0

    @property
    def inner(self) -> int:
        return HEADS * self.shape.sum_size

    @property
    def parameters(self) -> int:
        return 2 * self.model.hidden * self.inner + self.inner + self.model.hidden

    @property
    def carried(self) -> CarryOver:
        return CarryOver(heads=HEADS, tail=(TAPS - 1) * self.inner, state=self.inner)

    @property
    def saved(self) -> int:
        return 2 * self.model.hidden + 2 * self.inner

    @property
    def weight_inputs(self) -> int:
        return 2 * self.model.hidden + 2 * self.inner

    @property
    def recomputed(self) -> Mapping[str, RecomputedModule]:
        return {"layernorm": RecomputedModule(self.model.hidden, light=True)}


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
    made = profile(model, DEVICES["h100-80g"], logits_held=False)
    cost = Cost(made, even_layers(8, pp), (1e15,) * pp, 2, 2, layer_kinds=model.layer_kinds)
    budget = tuple(states + room_gib * GIB for states in cost.states_bytes)
    return dataclasses.replace(cost, device_budget_bytes=budget)


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_state_is_charged_by_border_whatever_the_tokens(scale: int, slices: int) -> None:
    """Nothing of a whole document; of a cut one a state at every border, in every layer."""
    cost, part = toy_cost(), 1000 * scale
    chunks = [Chunk((Span(0, n * part, (n + 1) * part),)) for n in range(slices)]
    loads = cost.loads(chunks, (slices * part,))
    borders, shards = slices - 1, cost.tp * cost.cp
    assert loads.borders.tolist() == [borders]
    attention = Cost(cost.profile.of_kind("full-heads-dense"), (1,), (1e15,), 2, 2)
    for found, of_attention, each in (
        (cost.kv_bytes(loads), attention.kv_bytes(loads), STATE_BYTES),
        (cost.kv_gradient_bytes(loads), attention.kv_gradient_bytes(loads), GRADIENT_BYTES),
    ):
        states = 3 * borders * each / shards  # a stage has three such layers, and one of attention
        np.testing.assert_allclose(found - of_attention, states)
    assert (cost.seconds(Kind.FORWARD, loads) > 0).all()


def test_it_is_planned_for(tmp_path) -> None:
    cost = toy_cost(room_gib=6.0)
    assert cost.kinds_text == "2*(3*full-sum-dense full-heads-dense)"
    lengths = (120_000, 9_000, 40_000, 700, 3_000)
    for name in ("epp", "infinipipe"):
        planned = PLANNERS[name](lengths, cost, Options())
        check(planned.plan)
        assert planned.fits
    borders = cost.loads(planned.plan.chunks, planned.plan.documents).borders
    assert borders.sum() > 0
    # Larger states, the same orders: the peak grows by no less than those of one document.
    figures = dict(cost.profile.kinds)
    kind = "full-sum-dense"
    figures[kind] = dataclasses.replace(figures[kind], border_bytes=1e9)
    heavier = dataclasses.replace(cost, profile=cost.profile.with_kinds(figures))
    light, heavy = (play(planned.plan, one.table(planned.plan)) for one in (cost, heavier))
    grown = np.array(heavy.peak_bytes) - np.array(light.peak_bytes)
    assert (grown > 0.9 * 3 * borders.max() * 1e9 / 4).all()
    path = str(tmp_path / "profile.json")
    cost.profile.save(path)
    assert Profile.load(path) == cost.profile


def test_its_states_are_items_of_documents() -> None:
    cost = toy_cost()
    plan = PLANNERS["epp"]((60_000, 500), cost, Options()).plan
    table, loads = cost.table(plan), cost.loads(plan.chunks, plan.documents)
    assert np.array_equal(table.held_bytes[Item.KV], cost.kv_bytes(loads))


# --- what was forgotten ---------------------------------------------------------------------------

ANSWERS = {
    "MIXER": lambda part: isinstance(part.MIXER, bool),
    "WORD": lambda part: bool(part.WORD),
    "ALONE": lambda part: bool(part.ALONE),
    "parameters": lambda part: part.parameters > 0,
    "saved": lambda part: part.saved > 0,
    "weight_inputs": lambda part: part.weight_inputs > 0,
    # What stands in front of a layer no letter of the layer runs again.
    "recomputed": lambda part: part.BESIDE or "layernorm" in part.recomputed,
    "carried": lambda part: not getattr(part, "MIXER", False) or part.carried != CarryOver(),
}


def forgotten(part: Part) -> list[str]:
    """The answers that a class owes and does not give."""

    def given(name: str) -> bool:
        return hasattr(type(part), name) and ANSWERS[name](part)

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
    every = [part for shape in SHAPES for part in Layer(MODELS["llama3-8b"], shape).parts]
    assert {type(part) for part in every} == {*layer.PARTS}
    assert [(part, forgotten(part)) for part in every if forgotten(part)] == []


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_forgotten_is_named(answer: str, monkeypatch) -> None:
    monkeypatch.delattr(DecayedSum, answer)
    assert forgotten(DecayedSum(MODELS["llama3-8b"], SUM)) == [answer]
