"""Stock against a list of all of Megatron's ways to run small jobs, and what Megatron refuses."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.overlap import overlapped, overlaps, overlaps_experts
from megatron_epp.ir.placement import named_placement
from megatron_epp.planner.choose.choice import with_placement
from megatron_epp.planner.choose.partition import expected_features, fastest_layers
from megatron_epp.planner.options import Options
from megatron_epp.planner.published.schedules import packing_lengths
from megatron_epp.planner.registry import PLANNERS, planner_of
from megatron_epp.planner.stock import Stock, stock_of

K = 1024
NAMES = ("even", "interleaved 2", "interleaved 3", "interleaved 4")
DENSE = named_cost("llama3-8b", "h100-80g", pp=4, tp=2, zero=1)
EXPERTS = named_cost("qwen3-30b-a3b", "h100-80g", pp=2, cp=8, ep=8, zero=1)


def tight(cost: Cost, gib: float) -> Cost:
    """Return ``cost`` with little memory beside the model states."""
    most = max(cost.states_of_ranks) + gib * 2**30
    return cost.replace(device_budget_bytes=(most,) * cost.layout.placement.ranks)


WITHOUT_PIPELINE = tight(named_cost("qwen3-30b-a3b", "h100-80g", pp=1, cp=8, ep=8, zero=1), 60.0)


def every_way(lengths: list[int], cost: Cost, context: int) -> dict[tuple, float]:
    """Return the seconds of every schedule that Megatron accepts and that fits.

    Keys are placement, layers, whether communication overlaps, and length.
    """
    found = {}
    ranks = cost.layout.placement.ranks
    for name in NAMES if ranks > 1 else NAMES[:1]:
        placement = named_placement(name, ranks)
        assert placement is not None
        even = with_placement(cost, placement)
        by_time = fastest_layers(even, expected_features(even, [lengths]))
        for layers in {even.layout.layers, by_time or even.layout.layers}:
            placed = even.replace(layers=layers)
            for hides, tokens in itertools.product(
                (False, True), packing_lengths(max(lengths), context)
            ):
                experts = hides and overlaps_experts(placed)
                if hides and (not overlaps(placed) or name in NAMES[2:]):
                    continue
                if hides and not experts and tokens < context:
                    continue
                if experts and name == "even" and ranks > 1:
                    continue
                own = overlapped(placed) if hides else placed
                planned = PLANNERS["packing"](lengths, own, Options(context=tokens))
                if name != "even" and planned.chunks < ranks:
                    continue
                if not planned.fits or (experts and planned.recompute_ratio > 0):
                    continue
                found[name, layers, hides, tokens] = planned.seconds
    return found


def require_fastest(lengths: list[int], cost: Cost, context: int) -> Stock:
    found = every_way(lengths, cost, context)
    stock = stock_of([lengths], cost, Options(context=context))
    (batch,) = stock.batches
    assert batch.seconds == pytest.approx(min(found.values()), rel=1e-12)
    key = stock.placement, stock.cost.layout.layers, bool(stock.overlap), batch.tokens
    assert found[key] == pytest.approx(batch.seconds, rel=1e-12)
    assert stock.static == batch
    return stock


JOBS = (DENSE, tight(DENSE, 3.0), EXPERTS, tight(EXPERTS, 3.0), WITHOUT_PIPELINE)


@given(st.sampled_from(JOBS), st.lists(st.integers(64, 6000), min_size=1, max_size=10))
@settings(max_examples=8, deadline=None)
@pytest.mark.everything
def test_the_fastest_of_every_way_is_found(cost: Cost, lengths: list[int]) -> None:
    require_fastest(lengths, cost, 8 * K)


@pytest.mark.parametrize("cost", JOBS)
def test_the_fastest_way_of_a_batch(cost: Cost) -> None:
    require_fastest([5000, 3000, 2000, 900, 300, 64], cost, 8 * K)


def test_interleaved_stages_need_a_micro_batch_for_every_rank() -> None:
    equal = [4 * K] * 4
    assert stock_of([equal], DENSE, Options()).placement != "even"
    assert stock_of([equal[1:]], DENSE, Options()).placement == "even"


def test_the_overlap_of_experts_needs_virtual_stages_and_no_recompute() -> None:
    lengths = [32 * K] * 8
    found = stock_of([lengths], EXPERTS, Options())
    assert found.overlap == "60% of experts' exchanges hidden"
    assert found.placement == "interleaved 2" and found.batches[0].recomputed == 0
    assert stock_of([lengths[:1]], EXPERTS, Options()).overlap == ""  # one micro-batch, two ranks
    found = stock_of([lengths], tight(EXPERTS, 4.0), Options())
    assert found.batches[0].recomputed > 0 and found.overlap == ""
    found = stock_of([lengths], WITHOUT_PIPELINE, Options())
    assert found.overlap and str(found).startswith("no pipeline, packed to ")


def test_the_static_job_has_one_length_and_one_recompute() -> None:
    batches = [[6000, 3000, 2000, 900] * 4, [1500] * 40]
    stock = stock_of(batches, tight(DENSE, 2.0), Options(context=16 * K))
    assert len({each.tokens for each in stock.batches}) == 2
    one = stock.static
    assert one is not None and one.tokens >= 6000
    assert one.seconds * 2 >= sum(each.seconds for each in stock.batches)
    planned = [PLANNERS["packing"](e, stock.cost, Options(context=one.tokens)) for e in batches]
    assert one.seconds >= sum(each.seconds for each in planned) / 2 * (1 - 1e-12)
    for tokens in packing_lengths(6000, 16 * K):
        options = Options(context=tokens)
        others = [PLANNERS["packing"](each, stock.cost, options) for each in batches]
        notes = {each.note.partition("recomputed in every stage: ")[2] for each in others}
        if all(each.fits for each in others) and len(notes) == 1:
            assert one.seconds <= sum(each.seconds for each in others) / 2 * (1 + 1e-12)


def test_a_placement_is_one_for_all_batches_and_facts_say_it() -> None:
    batches = [[4 * K] * 16, [4 * K] * 3]  # the second has fewer micro-batches than ranks
    stock = stock_of(batches, DENSE, Options())
    assert stock.placement == "even"
    facts = stock.facts()
    assert facts["placement"] == "even" and len(facts["batches"]) == 2
    assert facts["static"]["tokens"] >= 4 * K and sum(facts["layers"]) == 32


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="none of Megatron's own schedules fits"):
        stock_of([[64 * K]], tight(DENSE, 0.01), Options())


def test_stock_is_no_planner() -> None:
    with pytest.raises(ValueError, match="'stock' is the baseline of compare"):
        planner_of("stock")
    with pytest.raises(ValueError, match="'packing-overlap' is part of 'stock' now"):
        planner_of("packing-overlap")
