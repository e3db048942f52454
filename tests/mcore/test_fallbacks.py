"""A planner process that dies costs its replica one plan: packing stands in, if that fits."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.control.planned_steps import PlannedSteps
from megatron_epp.control.planner_process import PlannerFailed
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.analytic import without_states
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.ir import PlanError, Step
from megatron_epp.planner.options import Options
from megatron_epp.planner.process import Answer
from megatron_epp.planner.replicas import plan_part, plan_step
from tests.mcore.runs import flags, trained

pytestmark = pytest.mark.everything


class Dying:
    """Planner processes that die ``times`` times before one answers."""

    def __init__(self, times: int, steps: PlannedSteps):
        self.times, self.steps = times, steps

    ahead = discarded = 0

    def reply(self, iteration, lengths, forward_only) -> Answer:
        self.times -= 1
        if self.times >= 0:
            raise PlannerFailed("the planner process has ended")
        made = plan_part(lengths, self.steps.cost, self.steps.options, "epp", 1, 0)
        return Answer("", 0.0, str(made), "")


@pytest.mark.parametrize(
    ("room", "deaths", "planner"),
    [
        (1.0, 1, "packing"),
        (0.4, 1, "epp"),  # what packing makes does not fit: the planner is asked once more
        (0.4, 2, None),
    ],
)
def test_a_fallback_that_does_not_fit_is_not_used(room, deaths, planner) -> None:
    model = Model("m", 4, 32, 64, 4, 2, 8, 128, gated=True)
    profile = without_states(analytic_profile(model, DEVICES["cpu"]))
    ample = Cost(StageLayout(profile, (2, 2)), (1e12, 1e12))
    lengths = [900, 700, 30, 20]
    kept = plan_step(lengths, ample, Options(context=4096), "packing", 1).planned[0].peak_bytes
    cost = ample.replace(device_budget_bytes=tuple(room * peak for peak in kept))
    groups = SimpleNamespace(replica=0, replicas=1)
    steps = PlannedSteps(cost, Options(context=4096), "epp", groups, processes=0)
    steps.pool = Dying(deaths, steps)
    if planner is None:
        with pytest.raises(PlanError, match=r"iteration 3: the planner failed .*, and again"):
            steps._plan(3, lengths, False)
    else:
        step, _ = steps._plan(3, lengths, False)
        assert [plan.predicted.planner for plan in step.plans] == [planner]


def test_one_replica_falls_back_for_one_iteration(corpus, tmp_path) -> None:
    words = flags(
        corpus, epp=True, epp_plan_ahead=True, train_iters=4, epp_record=tmp_path / "plans"
    )
    died = trained(words, 4, (str(Path(__file__).parent / "deadly.py"),))
    failed = "iteration 2, replica 1: the planner failed (the planner process has ended)"
    assert died.output.count("the planner failed") == 1 and failed in died.output
    # Every rank holds the plan of its own replica, one per iteration.
    held = re.findall(r"rank (\d) of replica (\d) holds plans of (.+)", died.output)
    assert sorted(held) == sorted((str(rank), str(rank % 2), str(rank % 2)) for rank in range(4))
    waits = (tmp_path / "plans" / "planning.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in waits] == ["iteration", "1", "2", "3", "4"]
    assert {line.split(",")[2] for line in waits[1:]} == {"1"}
    steps = (tmp_path / "plans" / f"iteration-00000{number}.step" for number in (2, 3, 4))
    planners = [
        [plan.predicted.planner for plan in Step.parse(step.read_text()).plans] for step in steps
    ]
    assert planners == [["epp", "packing"], ["epp", "epp"], ["epp", "epp"]]
