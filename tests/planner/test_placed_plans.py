"""Plans for ranks with several stages: checked, within memory, never below the bound."""

from random import Random

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Plan, check
from megatron_epp.ir.placement import read_placement
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import planner_of
from megatron_epp.planner.replicas import plan_step
from tests.planner.cases import evaluation_plan

LENGTHS = [Random(7).randint(200, 9000) for _ in range(24)]


def machine(placement: str, parallel: bool = False, budget_gib: float = 70.0) -> Cost:
    made = read_placement(placement, 2, lambda path: "")
    return named_cost(
        "llama3-8b", "h100-80g", pp=made.stages, tp=8, memory_budget_gib=budget_gib,
        vocabulary_parallel=parallel, place=made.place,
    )  # fmt: skip


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("planner", ["epp", "packing"])
@pytest.mark.parametrize(
    "placement", ["v", "interleaved 2", "place 1 0 0 1 0 1", "place 1 0 1 0 1"]
)
def test_planned_for_any_placement(placement: str, planner: str, parallel: bool) -> None:
    cost = machine(placement, parallel)
    found = planner_of(planner)(LENGTHS, cost, Options(context=16384, effort=1))
    plan = found.plan
    check(plan)
    assert plan.place == cost.layout.place and plan.vocabulary_parallel == parallel
    assert Plan.parse(str(plan)) == plan
    assert found.fits and len(found.peak_bytes) == 2 and max(found.peak_bytes) <= 70 * GIB
    assert 0 < found.lower_bound_seconds <= found.seconds


def test_infinipipe_is_for_one_stage_a_rank() -> None:
    with pytest.raises(ValueError, match=r"expected the placement one stage a rank$"):
        planner_of("infinipipe")(LENGTHS, machine("v"), Options())


def test_replicas_and_evaluation() -> None:
    cost = machine("v").replace(dp=2)
    made = plan_step(LENGTHS, cost, Options(context=16384, effort=1), replicas=2)
    assert {plan.place for plan in made.step.plans} == {(1, 0, 0, 1)}
    for parallel in (False, True):
        plan = evaluation_plan(LENGTHS, machine("v", parallel))
        check(plan)
        assert plan.forward_only and plan.place == (1, 0, 0, 1)
