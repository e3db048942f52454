"""Where a placement pays: chosen with the layers of its stages; published methods as plans."""

import dataclasses
from dataclasses import replace
from itertools import product

import pytest

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind, Plan, check
from megatron_epp.ir.placement import named_placement
from megatron_epp.planner.choose import choice
from megatron_epp.planner.choose.choice import (
    PLACEMENT_NAMES,
    PLACEMENT_PAYS,
    RunChoice,
    run_choice,
    sketched_seconds,
    with_placement,
)
from megatron_epp.planner.choose.partition import expected_features, fastest_layers
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS, planner_of
from tests.cost.simple_device import OLD_H100

FEW, MANY = [8000] * 4, [8000] * 240
QUICK = Options(context=8192, effort=0)


def machine(name: str = "even") -> Cost:
    cost = named_cost("llama3-8b", OLD_H100, pp=2, tp=8, logits_held=False)
    made = named_placement(name, 2)
    return cost if name == "even" else with_placement(cost, made)


def chosen(cost: Cost, batches: list[list[int]], planner: str = "packing", **how) -> RunChoice:
    how = {"placements": PLACEMENT_NAMES} | how
    return run_choice(cost, batches, QUICK, planner, **how)


def test_few_micro_batches_want_several_stages_on_a_rank_and_many_do_not() -> None:
    """Packed: there are as many micro-batches as documents, and a bubble for a few of them."""
    few = chosen(machine(), [FEW])
    assert few.way.placement in PLACEMENT_NAMES and sum(few.cost.layout.layers) == 32
    assert few.cost.layout.layers == few.way.layers
    default = next(iter(few.seconds))
    taken = sketched_seconds(few.cost, [FEW], QUICK, "packing")
    assert taken == few.seconds[few.way] < few.seconds[default] * (1 - PLACEMENT_PAYS)
    assert few.gain == 1 - taken / few.seconds[default]
    assert few.comparison.startswith("compared with one stage a rank, layers 16 16: ")
    assert f"{few.way} takes {few.gain:.1%} less time" in few.comparison
    many = chosen(machine(), [MANY])
    assert many.way.placement == "even" and not many.cost.layout.place
    others = {way.placement for way in many.seconds}
    assert len(others) > 1, "the fastest others are planned for all batches"


def test_the_choice_is_the_fastest_of_all_candidates_planned_alone() -> None:
    """On one batch, where every candidate can be planned in full."""
    how = Options(context=65_536, effort=0)
    documents = [30_000, 12_000, 5000, 3000, 3000, 900, 700, 400]
    found = run_choice(
        *(machine(), [documents], how, "epp"),
        placements=PLACEMENT_NAMES,
        vocabularies=(False, True),
    )
    seconds = []
    for name, vocabulary in product(("even", *PLACEMENT_NAMES), (False, True)):
        cost = machine(name).with_vocabulary(vocabulary)
        layers = fastest_layers(cost, expected_features(cost, [documents]))
        for each in (cost, cost.replace(layers=layers)):
            seconds.append(sketched_seconds(each, [documents], how, "epp"))
    assert found.seconds[found.way] <= min(filter(None, seconds)) * (1 + PLACEMENT_PAYS)


def test_documents_with_shared_prefixes_are_planned_as_such() -> None:
    """Computed once they are few, computed whole they are many."""
    groups = [PrefixForest.parsed(f"16384+({','.join(['700'] * 16)})")] * 4
    forest = PrefixForest.joined(each for each in groups if each is not None)
    how = Options(context=max(forest.lengths), effort=0)
    two, together = machine().replace(dp=2), replace(how, lockstep=2)
    four = machine().replace(dp=4)
    found, whole, halves, group, groups_of_lengths, half_groups = (
        run_choice(cost, [batch], options, "epp", placements=("v",))
        for cost, batch, options in (
            (machine(), forest, how),
            (machine(), forest.lengths, how),
            (two, forest, how),
            (two, forest, together),
            (two, forest.lengths, together),
            (four, forest, together),
        )
    )
    default = next(iter(found.seconds))
    assert found.way.placement == "v" and found.gain > PLACEMENT_PAYS
    assert whole.gain < found.gain and whole.seconds[default] > 5 * found.seconds[default]
    for way, cost in ((default, machine()), (found.way, found.cost)):
        planned = PLANNERS["epp"].plan_forest(forest, cost, how).planned[0]
        assert found.seconds[way] == planned.seconds
    in_lockstep = PLANNERS["epp"].plan_forest(forest, two, together).planned
    assert group.seconds[default] == max(each.seconds for each in in_lockstep)
    assert groups_of_lengths.seconds[default] > 5 * group.seconds[default]
    assert half_groups.seconds[default] == pytest.approx(group.seconds[default] / 2, rel=0.15)
    assert halves.seconds[default] == pytest.approx(found.seconds[default] / 2, rel=0.15)


@pytest.mark.parametrize("name", ["v", "interleaved 4"])
def test_a_named_placement_costs_what_a_chosen_one_does(name: str) -> None:
    """Messages stay in the node of the ranks, of which there are fewer than stages."""
    degrees = {"pp": 2, "tp": 4, "topology": "nodes"}
    placement = named_placement(name, 2)
    assert placement is not None
    placed = with_placement(named_cost("llama3-8b", "h100-80g", **degrees), placement)
    degrees |= {"pp": placement.stages, "place": placement.place}
    assert named_cost("llama3-8b", "h100-80g", **degrees).layout == placed.layout


def test_what_cannot_run_is_no_candidate() -> None:
    """Too few layers for the stages, words that do not divide, a planner of one stage a rank."""
    cost = machine().replace(layers=(2, 2), profile=machine().layout.profile, layer_kinds=())
    found = chosen(cost, [FEW], vocabularies=(False, True), words=32)
    assert {way.placement for way in found.seconds} <= {"even", "v", "interleaved 2"}
    assert all(len(way.layers) * 8 in (16, 32) for way in found.seconds if way.vocabulary)
    narrow = chosen(cost, [FEW], vocabularies=(False, True), words=16)
    assert not any(way.vocabulary for way in narrow.seconds if way.placement != "even")
    alone = chosen(cost, [FEW], "infinipipe")
    assert {way.placement for way in alone.seconds} == {"even"}


def test_what_is_named_is_a_candidate_even_if_it_cannot_run() -> None:
    """Planning then says why: words that do not divide, or a planner of other placements."""
    named = chosen(machine(), [FEW], placements=(), vocabularies=(True,), words=1)
    assert named.cost.layout.vocabulary_parallel
    with pytest.raises(ValueError, match=r"expected the placement v$"):
        planner_of("zb-v")(FEW, chosen(machine(), [FEW], "zb-v", placements=()).cost, QUICK)


@pytest.mark.parametrize(("on_slow_hosts", "pays"), [(1.1, False), (0.995, False), (0.98, True)])
def test_where_hosts_are_assumed_a_gain_counts_on_slow_hosts_too(
    on_slow_hosts: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several stages a rank take 0.9 of the time on the assumed host."""
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8, logits_held=False)
    assumed = float(cost.seconds.host[Kind.FORWARD].sum())

    def seconds(of: Cost, *_: object) -> float:
        slow = float(of.seconds.host[Kind.FORWARD].sum()) > 1.5 * assumed
        return (on_slow_hosts if slow else 0.9) if of.layout.place else 1.0

    monkeypatch.setattr(choice, "sketched_seconds", seconds)
    found = chosen(cost, [FEW])
    assert bool(found.cost.layout.place) == pays
    assert found.slow_gain == pytest.approx(1 - on_slow_hosts if pays else 0)
    measured = dataclasses.replace(cost.layout.profile.provenance, kind="measured")
    profile = dataclasses.replace(cost.layout.profile, provenance=measured)
    sure = chosen(cost.replace(profile=profile), [FEW])
    assert sure.cost.layout.place and sure.slow_gain is None


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
