"""A kind of layer that carries a state is charged by border; what a ``Part`` forgot is named.

What carries a state at run time is the store that keeps K and V, in tests/layers/test_states.py: as
many rows as there are borders, and as many of gradients.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.columns import Column
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.kinds import layer
from megatron_epp.cost.kinds.base import CarryOver, Part, Sublayer
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.cost.kinds.ssm import MambaPart
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import OF_LAYERS, Chunk, Kind, Span
from tests.cost.simple_device import SIMPLE

MAMBA = LayerShape(attention=False, mamba_heads=8, state_groups=2, state_keys=16, state_values=4)


@pytest.mark.parametrize("scale", [1, 5])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_state_is_charged_by_border_whatever_the_tokens(scale: int, slices: int) -> None:
    """Nothing of a whole document; of a cut one a state at every border, in every layer."""
    whole = named_cost("nemotron-h-8b", "h100-80g", pp=1, tp=2, cp=2)
    of, part = whole.layout.profile.of_kind("mamba"), 1000 * scale
    cost = Cost(StageLayout(of, (3,), 2, 2), (1e15,))
    chunks = [Chunk((Span(0, n * part, (n + 1) * part),)) for n in range(slices)]
    loads = cost.loads(chunks, (slices * part,))
    assert loads.boundaries.tolist() == [slices - 1]
    for found, each in (
        (cost.memory.kv_bytes(loads), of.border_bytes),
        (cost.memory.kv_gradient_bytes(loads), of.border_gradient_bytes),
    ):
        np.testing.assert_allclose(found, [[3 * (slices - 1) * each / 4]])
        assert each > 0


@dataclass(frozen=True, slots=True)
class Blocks(Column):
    """Blocks of ``size`` rows that a scan goes through, one after the other."""

    NAME = "blocks"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        return -(-(stop - start) // self.size)


def test_a_parts_own_column_is_priced_and_kept_in_files(monkeypatch) -> None:
    monkeypatch.setattr(MambaPart, "COLUMNS", (Blocks,))
    plain = profile(MODELS["llama3-8b"], SIMPLE)
    made = dataclasses.replace(plain, column_seconds={Blocks(256): dict.fromkeys(OF_LAYERS, 1e-3)})
    text = made.to_json()
    assert Profile.from_json(text) == made and "column_seconds" not in plain.to_json()
    with pytest.raises(ValueError, match="column_seconds: 'blocs 256': no kind of layers has such"):
        Profile.from_json(text.replace("blocks 256", "blocs 256"))
    chunks = [Chunk((Span(0, 0, 300),)), Chunk((Span(0, 300, 1000), Span(1, 0, 257)))]
    of, without = (Cost(StageLayout(each, (2,)), (1e15,)) for each in (made, plain))
    loads = of.loads(chunks, (1000, 257))
    more = of.seconds.of(Kind.FORWARD, loads) - without.seconds.of(Kind.FORWARD, loads)
    np.testing.assert_allclose(more, [[2 * 2e-3, 2 * (3 + 2) * 1e-3]])


# --- what a part forgot ---------------------------------------------------------------------------

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
    LayerShape(kv_rank=64, index_heads=4, index_size=16, chosen_keys=32),
    LayerShape(experts=8, active_experts=2, expert_hidden=64),
    LayerShape(attention=False),
    LayerShape(mlp=False),
    LayerShape(predicts=True),
    LayerShape(attention=False, delta_heads=8, state_groups=2, state_keys=16, state_values=4),
    MAMBA,
)


def test_every_part_gives_its_answers() -> None:
    every = [
        each for shape in SHAPES for each in Layer.of(MODELS["llama3-8b"], shape).parts.items()
    ]
    assert {part for part, _ in every} == {*layer.PARTS}
    assert [(part, forgotten(part, has)) for part, has in every if forgotten(part, has)] == []


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_forgotten_is_named(answer: str, monkeypatch) -> None:
    has = MambaPart.of(MODELS["llama3-8b"], MAMBA)
    if answer.isupper():
        owner = next(each for each in MambaPart.__mro__ if answer in vars(each))
        monkeypatch.delattr(owner, answer)
    else:
        default = {"recomputed": {}, "carried": CarryOver()}.get(answer, 0)
        has = dataclasses.replace(has, **{answer: default})
    assert forgotten(MambaPart, has) == [answer]
