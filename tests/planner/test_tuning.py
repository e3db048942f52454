"""Layouts, and the survey against a simulation of all of them."""

import dataclasses

import pytest

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.choose.choice import heaviest
from megatron_epp.planner.choose.slow_hosts import slow_host_line
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PACKED, PLANNERS, STOCK
from megatron_epp.planner.replicas import plan_step
from megatron_epp.planner.stock import stock_of
from megatron_epp.planner.tuning.layouts import JobRequest, Layout, divisors, layouts
from megatron_epp.planner.tuning.survey import ELASTIC, choice_of, partitions, slow_hosts, survey
from megatron_epp.sim.exchange import exchange
from megatron_epp.sim.play import play
from tests.cost.simple_device import OLD_H100

LLAMA = MODELS["llama3-8b"]
K = 1024


def cost_for(layout: Layout) -> Cost:
    degrees = {name: getattr(layout, name) for name in ("pp", "tp", "cp", "dp")}
    return named_cost("llama3-8b", "h100-80g", **degrees, logits_held=False, topology="nodes")


def test_layouts_fill_the_devices_and_are_megatrons() -> None:
    found = list(layouts(LLAMA, 64, 8, 48))
    assert len(found) == len(set(found)) > 20
    for each in found:
        assert each.tp * each.cp * each.pp * each.dp == 64
        assert each.tp <= 8 and LLAMA.heads % (each.tp * each.cp) == 0
        assert each.pp <= LLAMA.layers and 48 % each.dp == 0
    assert Layout(1, 8, 4, 2) in found and Layout(1, 1, 1, 64) not in found
    named = list(layouts(LLAMA, 64, 8, 48, JobRequest(tp=2, pp=4)))
    assert named and all(each.tp == 2 and each.pp == 4 for each in named)
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.everything
def test_the_first_choice_is_within_two_percent_of_the_best_of_all() -> None:
    """Of 8 devices."""
    batch = open_corpus("wlb", 8 * K).batch(3, 8)
    found = list(layouts(LLAMA, 8, 8, 8))
    options = Options(8 * K, effort=0)
    first = survey(found, [batch], cost_for, options).choices[0]
    seconds = {}
    for layout in found:
        try:
            even = cost_for(layout)
            for layers in partitions(even, batch, True):
                cost = even.replace(layers=layers)
                stock = stock_of([heaviest(batch, even)], even, options)
                packed = dataclasses.replace(options, context=stock.batches[0].tokens)
                for planner, maker, own, how in (
                    (ELASTIC, ELASTIC, cost, options),
                    (STOCK, PACKED, stock.cost, packed),
                ):
                    step = plan_step(batch, own, how, maker, layout.dp)
                    slowest = max(step.planned, key=lambda planned: planned.seconds)
                    plan = dataclasses.replace(slowest.plan, replica=0, replicas=1)
                    between = exchange(own, play(plan, own.table(plan))).exposed_seconds
                    key = layout, own.layout.layers, planner
                    seconds[key] = step.seconds + between
        except ValueError:
            continue
    assert len(seconds) > 10
    mine = seconds[first.layout, first.layers, first.planner]
    assert mine <= 1.02 * min(seconds.values())


@pytest.mark.everything
def test_choices_of_unlike_batches_are_compared_on_all_of_them() -> None:
    """The first batch is half of the others: what was planned on it alone would seem the best."""
    short = open_corpus("wlb", 8 * K).batch(3, 8)
    long = [min(2 * length, 8 * K) for length in short]
    batches = [short, long, long]
    made = survey(list(layouts(LLAMA, 8, 8, 8)), batches, cost_for, Options(8 * K, effort=0))
    finals = [choice for choice in made.choices if choice.batches == 3]
    assert list(made.choices[: len(finals)]) == finals and len(finals) < len(made.choices)
    tokens = sum(map(sum, batches)) / 3
    for choice in made.choices:
        assert choice.seconds * choice.tokens_per_second == pytest.approx(tokens)
        assert sum(choice.shares.values()) == pytest.approx(1)


@pytest.mark.everything
def test_a_bound_rules_out_only_what_is_slower() -> None:
    batch = open_corpus("wlb", 8 * K).batch(3, 8)
    found = list(layouts(LLAMA, 8, 8, 8))
    options = Options(8 * K, effort=0)
    few = survey(found, [batch], cost_for, options, top=2)
    assert few.bounded
    for layout in few.bounded:
        even = cost_for(layout)
        for layers in partitions(even, batch, True):
            slower = choice_of(layout, even, layers, [batch], options, ELASTIC)
            assert slower.seconds > few.choices[0].seconds


def test_experts_over_replicas_are_planned_as_training_runs_them() -> None:
    """Four replicas share a layer's experts: their block is planned in lockstep."""
    layout = Layout(1, 2, 2, 4)
    cost = named_cost(
        "qwen3-30b-a3b", OLD_H100, pp=2, cp=2, dp=4, ep=8, logits_held=False, topology="nodes"
    )
    batch = open_corpus("wlb", 8 * K).batch(3, 16)
    options = Options(8 * K, effort=0)
    chosen = choice_of(layout, cost, cost.layout.layers, [batch], options, ELASTIC)
    steps = {
        lockstep: plan_step(batch, cost, dataclasses.replace(options, lockstep=lockstep), "epp", 4)
        for lockstep in (1, 4)
    }
    planned = chosen.seconds - chosen.exchange_seconds
    assert planned == pytest.approx(steps[4].seconds) and planned > steps[1].seconds
    assert chosen.facts()["ep"] == 8
    alone = cost.replace(ep=2)
    within = choice_of(layout, alone, cost.layout.layers, [batch], options, ELASTIC)
    assert within.ep == 2 and within.seconds < chosen.seconds


@pytest.mark.parametrize("lockstep", [1, 2])
def test_the_loss_on_slow_hosts_is_of_the_plan_of_the_choice(lockstep: int) -> None:
    """Of a lockstep group, all replicas count."""
    model, experts = ("llama3-8b", {}) if lockstep == 1 else ("qwen3-30b-a3b", {"ep": 16})
    layout, degrees = Layout(8, 1, 4, lockstep), {"pp": 4, "tp": 8, "dp": lockstep}
    cost = named_cost(model, "h100-80g", **degrees, **experts, logits_held=False)
    batch, options = [9000, 4000, 2500, *[400] * 40] * lockstep, Options(16 * K, effort=1)
    chosen = choice_of(layout, cost, cost.layout.layers, [batch], options, ELASTIC)
    together = dataclasses.replace(options, lockstep=lockstep)
    group = PLANNERS[ELASTIC].plan_block(batch, cost, together).planned
    assert len(group) == lockstep
    line = slow_hosts(chosen, batch, options)
    assert line is not None and line == slow_host_line(group, cost, together, ELASTIC)


def test_what_cannot_run_is_named_with_its_reason() -> None:
    layout = Layout(1, 1, 1, 8)
    made = survey([layout], [[300_000, 1000] * 8], cost_for, Options(effort=0))
    assert not made.choices and "document" in made.refused[layout]
