"""Where a placement pays: chosen with the layers of its stages; published methods as plans."""

import dataclasses

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind, Plan, check
from megatron_epp.ir.placement import named_placement
from megatron_epp.planner import Options, planner_of
from megatron_epp.planner.choose.choice import (
    PLACEMENT_PAYS,
    partition_of,
    placement_of,
    sketched_seconds,
    vocabulary_of,
    with_placement,
)
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import survey
from tests.cost.simple_device import OLD_H100

FEW, MANY = [8000] * 4, [8000] * 48
QUICK = Options(context=8192, effort=0)


def machine(name: str = "even") -> Cost:
    cost = named_cost("llama3-8b", OLD_H100, pp=2, tp=8, logits_held=False)
    made = named_placement(name, 2)
    return cost if name == "even" else with_placement(cost, made)


def test_few_micro_batches_want_several_stages_on_a_rank_and_many_do_not() -> None:
    """Packed: there are as many micro-batches as documents, and a bubble for a few of them."""
    few = placement_of(machine(), [FEW], QUICK, "packing")
    assert few.key != "even" and few.cost.layout.place and sum(few.cost.layout.layers) == 32
    taken = sketched_seconds(few.cost, [FEW], QUICK, "packing")
    assert taken == few.seconds[few.key] < few.seconds["even"] * (1 - PLACEMENT_PAYS)
    assert "less time" in few.comparison
    many = placement_of(machine(), [MANY], QUICK, "packing")
    assert many.key == "even" and not many.cost.layout.place
    assert "interleaved 2" in many.comparison and " v " in many.comparison


@pytest.mark.parametrize(
    ("device", "planner", "layers", "placement", "placed_layers", "sharded"),
    [
        (OLD_H100, "epp", (17, 15), "v", (8, 8, 8, 8), True),
        (OLD_H100, "packing", (17, 15), "interleaved 2", (5, 9, 10, 8), False),
        ("a100-40g", "packing", (15, 17), "interleaved 2", (7, 9, 8, 8), False),
    ],
)
@pytest.mark.everything
def test_choices_are_those_of_three_searches(
    device: str, planner: str, layers: tuple, placement: str, placed_layers: tuple, sharded: bool
) -> None:
    """As recorded at d652579, where layers, placement and vocabulary had a search each."""
    cost = named_cost(
        "llama3-8b", device, pp=2, tp=8 if device == OLD_H100 else 4, logits_held=False
    )
    documents = [30_000, 12_000, 5000, 3000, 3000, 900, 700, 400, 30_000, 12_000, 5000, 3000]
    batches = [documents, [60_000, 20_000, 9_000, *[4_000] * 9]]
    how = batches, Options(context=65_536, effort=0), planner
    assert partition_of(cost, *how).key == layers
    placed = placement_of(cost, *how)
    assert (placed.key, placed.cost.layout.layers) == (placement, placed_layers)
    assert vocabulary_of(cost, *how).cost.layout.vocabulary_parallel == sharded


def test_too_few_layers_for_several_stages() -> None:
    cost = machine().replace(layers=(1, 1), profile=machine().layout.profile, layer_kinds=())
    found = placement_of(cost, [FEW], QUICK, "packing")
    assert found.key == "even" and found.seconds["v"] is None
    assert "v fits no plan" in found.comparison


@pytest.mark.parametrize(
    ("method", "placement"),
    [("1f1b", "even"), ("1f1b", "interleaved 2"), ("zb-v", "v"), ("adaptis", "v"),
     ("adaptis", "place 1 0 0 1 0 1"), ("slimpipe", "interleaved 2"), ("slimpipe", "even")],
)  # fmt: skip
def test_published_methods_make_plans(method: str, placement: str) -> None:
    lengths = [8000, 5000, 3000, *[900] * 12]
    found = planner_of(method)(lengths, machine(placement), QUICK)
    check(found.plan)
    assert Plan.parse(str(found.plan)) == found.plan and found.fits
    assert found.plan.place == machine(placement).layout.place
    kinds = {op.kind for order in found.plan.orders for op in order}
    split = method == "zb-v" or (method == "adaptis" and "split" in found.note)
    assert (Kind.WEIGHT in kinds) == split
    cut = any(len(chunk.spans) and chunk.spans[0].start for chunk in found.plan.chunks)
    assert cut == (method == "slimpipe")


def test_equal_micro_batches_are_megatrons_1f1b() -> None:
    """Warm-up of p - r forwards, then one backward and one forward."""
    plan = planner_of("1f1b")(FEW, machine(), QUICK).plan
    assert [str(op) for op in plan.orders[0]] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert [str(op) for op in plan.orders[1]] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    even = planner_of("1f1b")(FEW, machine(), QUICK).seconds
    assert planner_of("1f1b")(FEW, machine("interleaved 2"), QUICK).seconds < even


def test_a_method_on_other_stages_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'zb-v' does not plan stages on ranks 0 1; .*placement v$"
    ):
        planner_of("zb-v")(FEW, machine(), QUICK)
    with pytest.raises(ValueError, match="expected the placement one stage a rank, or interleaved"):
        planner_of("1f1b")(FEW, machine("v"), QUICK)


@pytest.mark.everything
def test_tune_weighs_several_stages_on_a_rank() -> None:
    """For few long documents on eight ranks of one device, whole ones; the choice says where stages
    lie, and fits."""
    layout = Layout(8, 1, 8, 1)

    def cost_for(layout: Layout) -> Cost:
        return named_cost("llama3-8b", "h100-80g", pp=layout.pp, tp=layout.tp, logits_held=False)

    how = dataclasses.replace(QUICK, effort=1)
    found = [
        survey([layout], [FEW], cost_for, how, placement=wanted).choices for wanted in (False, True)
    ]
    (even, placed_one) = (min(choices, key=lambda c: c.seconds) for choices in found)
    assert even.place == () and "place" not in even.facts()
    assert len(placed_one.place) == 16 and placed_one.facts()["place"] == placed_one.place
    assert placed_one.seconds < even.seconds * (1 - PLACEMENT_PAYS) and sum(placed_one.layers) == 32
