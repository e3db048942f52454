"""Memory by part, the model's own flops, what fits, and experts over replicas in a survey."""

import dataclasses

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.ir import PlanError
from megatron_epp.planner.feasibility import require_fit
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import plan_step
from megatron_epp.planner.tuning.capacity import capacity, longest_document
from megatron_epp.planner.tuning.layouts import JobRequest, Layout, layouts
from megatron_epp.planner.tuning.parts import PARTS, memory_parts, states_parts
from megatron_epp.planner.tuning.survey import survey
from megatron_epp.sim.play import play

K = 1024
LENGTHS = (24 * K, 5 * K, 4 * K, 2 * K, 2 * K, 900, 700, 300)
GIB = 2**30


# The output layer over the stages is epp's alone; ZB-V wants stages in a V.
PLANNED = [*((name, False) for name in PLANNERS if name != "zb-v"), ("epp", True)]


@pytest.mark.parametrize(("planner", "cut"), PLANNED)
def test_parts_add_up_to_the_peak_of_every_rank(planner: str, cut: bool) -> None:
    cost = named_cost(
        "llama3-8b", "h100-80g", pp=2, tp=4, zero=1, logits_held=False, vocabulary_parallel=cut
    )
    levers = Options(32 * K).levers | {"wsplit"}
    (planned,) = plan_step(LENGTHS, cost, Options(32 * K, levers, effort=0), planner, 1).planned
    ranks = memory_parts(planned.plan, cost)
    peaks = play(planned.plan, cost.table(planned.plan)).peak_bytes
    for stage, (parts, peak) in enumerate(zip(ranks, peaks, strict=True)):
        assert tuple(parts) == PARTS and all(held >= 0 for held in parts.values())
        assert sum(parts.values()) == pytest.approx(peak, abs=8)
        held = float(cost.memory.parameters[0][stage])
        states = (2 * held, 4 * held, 12 * held)  # one replica: nothing to shard them over
        of_states = ("weights", "gradients", "optimizer")
        for name, expected in zip(of_states, states, strict=True):
            assert parts[name] == pytest.approx(expected, abs=1)
    saved = cost.memory.states_bytes[0] + ranks[0]["activations"] + ranks[0]["K/V"]
    assert ranks[0]["activations"] > GIB and saved <= peaks[0]
    cuts = any(len({s.document for s in c.spans}) and c.spans[0].start for c in planned.plan.chunks)
    assert bool(cuts) == (sum(parts["K/V"] for parts in ranks) > 0)


def test_a_cpus_budget_is_without_states() -> None:
    cost = named_cost("llama3-8b", "cpu", pp=2, zero=1, logits_held=False)
    assert {held for parts in states_parts(cost) for held in parts.values()} == {0.0}


def test_flops_are_those_of_the_textbook() -> None:
    dense = Model("x", 3, 512, 1536, 8, 4, 64, 1000, gated=True)
    lengths = [100, 300]
    tokens, pairs = 400, 100 * 101 // 2 + 300 * 301 // 2
    norms = 2 * 512  # counted with the weights of their sublayers
    weights = 3 * (512 * 64 * (8 + 4 + 4 + 8) + 3 * 512 * 1536 + norms) + 512 * 1000
    expected = 6 * weights * tokens + 12 * 3 * 8 * 64 * pairs
    assert dense.training_flops(lengths) == pytest.approx(expected)
    window = dataclasses.replace(dense, kinds={"window": LayerShape(window=10)})
    seen = sum(min(at, 10) for length in lengths for at in range(1, length + 1))
    less = 12 * 3 * 8 * 64 * (pairs - seen)
    assert window.training_flops(lengths) == pytest.approx(expected - less)
    mixture = LayerShape(experts=16, active_experts=2, expert_hidden=256)
    routed = dataclasses.replace(dense, kinds={"experts": mixture})
    unused = 3 * 14 * 3 * 512 * 256
    assert routed.active_parameters == routed.parameters - unused
    assert dense.active_parameters == dense.parameters


def test_the_longest_document_is_the_last_that_fits() -> None:
    for pp, tp in ((1, 8), (4, 2)):
        cost = named_cost("llama3-8b", "h100-80g", pp=pp, tp=tp, zero=1, logits_held=False)
        most = longest_document(cost)
        require_fit(cost, (most,))
        with pytest.raises(PlanError):
            require_fit(cost, (round(most * 1.01) + 2,))
        assert longest_document(cost, most + most // 50) == 0


def cost_for(layout: Layout):
    return named_cost(
        "qwen3-30b-a3b",
        "h100-80g",
        **{name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp")},
        ep=layout.ep or None,
        logits_held=False,
        topology="nodes",
        zero=1,
    )


@pytest.mark.everything
def test_experts_are_tried_inside_a_stage_and_over_replicas() -> None:
    mixture = MODELS["qwen3-30b-a3b"]
    found = list(layouts(mixture, 16, 8, 16))
    assert {each.ep for each in found if (each.tp, each.cp, each.pp) == (2, 1, 2)} == {0, 4, 8}
    assert len(found) == len(set(found))
    named = list(layouts(mixture, 16, 8, 16, JobRequest(ep=8)))
    assert {each.ep for each in named} == {0} and len(named) < len(found)
    assert {each.ep for each in layouts(MODELS["llama3-8b"], 16, 8, 16)} == {0}
    assert str(Layout(2, 1, 2, 4, 8)) == "tp 2 cp 1 pp 2 dp 4 ep 8"
    # States of all experts on every device fit nowhere; over replicas they do.
    wanted = JobRequest(tp=1, cp=1, pp=2)
    both = list(layouts(mixture, 16, 8, 16, wanted))
    result = survey(both, [LENGTHS], cost_for, Options(32 * K, frozenset(), 0), top=2)
    assert Layout(1, 1, 2, 8) in result.refused
    best = result.choices[0]
    assert best.layout.ep == best.ep > 1 and f"ep {best.ep}" in best.facts()["layout"]
    assert best.plan is not None and best.peak_bytes == max(
        play(best.plan, best.cost.table(best.plan)).peak_bytes
    )
    assert capacity(both, cost_for).fitting == len(both) - len(
        [each for each in both if each in result.refused]
    )
