"""An iteration that the fallback planned is planned so again by a run that is resumed before it."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.control.fallbacks import FALLBACKS_FILE, Fallbacks
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


def test_fallbacks_are_kept_and_read_again(tmp_path) -> None:
    ours = Fallbacks([str(tmp_path / "a"), str(tmp_path / "b")])
    assert ours.of(7) is None
    assert not (tmp_path / "a").exists()
    ours.add(12, "packing", "it was\nkilled")
    ours.add(7, "packing", "")
    text = (tmp_path / "b" / FALLBACKS_FILE).read_text()
    assert text == (
        "iteration 7 planner packing no reason\niteration 12 planner packing it was killed\n"
    )
    again = Fallbacks([str(tmp_path / "c")], str(tmp_path / "a"))
    assert (again.of(7), again.of(8), again.of(12)) == ("packing", None, "packing")
    assert (tmp_path / "c" / FALLBACKS_FILE).read_text() == text
    # Where several replicas plan, a line names whose planner failed; others are not meant.
    again.add(13, "packing", "hung", (1, 2))
    told = Fallbacks([])
    told.read(again.text)
    assert told.text.splitlines()[-1] == "iteration 13 replica 1 of 2 planner packing hung"
    assert told.of(13, (1, 2)) == "packing" and told.of(12, (1, 2)) == "packing"
    assert told.of(13, (0, 2)) is None and told.of(13, (1, 4)) is None and told.of(13) is None
    # A run that resumes nothing forgets what another left in its folder.
    Fallbacks([str(tmp_path / "c")])
    assert Fallbacks([], str(tmp_path / "c")).of(7) is None


def test_a_damaged_file_is_named_with_its_line(tmp_path) -> None:
    (tmp_path / FALLBACKS_FILE).write_text("iteration 7 planner packing died\niteration 0 no\n")
    with pytest.raises(
        ValueError, match=rf"{FALLBACKS_FILE}, line 2: 'iteration 0 no' is not a fallback"
    ):
        Fallbacks([], str(tmp_path))


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
    assert steps.fallbacks.of(3) == ("packing" if planner == "packing" else None)


def test_a_resumed_run_repeats_the_fallback(corpus, tmp_path) -> None:
    # Dropout draws by the chunk: another plan, another loss.
    common = {
        "epp": True,
        "epp_plan_ahead": True,
        "train_iters": 4,
        "hidden_dropout": 0.1,
        # Replicas draw by their own chunks; without it a checkpoint has the first one's state.
        "data_parallel_random_init": True,
        "save_interval": 1,
    }
    first, again = tmp_path / "first", tmp_path / "again"
    deadly = (str(Path(__file__).parent / "deadly.py"),)
    died = trained(flags(corpus, **common, save=first, epp_record=first / "plans"), 4, deadly)
    failed = "iteration 2, replica 1: the planner failed (the planner process has ended)"
    assert died.output.count("the planner failed") == 1 and failed in died.output
    text = (first / FALLBACKS_FILE).read_text()
    assert text == "iteration 2 replica 1 of 2 planner packing the planner process has ended\n"
    # Every rank holds the plan of its own replica, one per iteration.
    held = re.findall(r"rank (\d) of replica (\d) holds plans of (.+)", died.output)
    assert sorted(held) == sorted((str(rank), str(rank % 2), str(rank % 2)) for rank in range(4))
    waits = (first / "plans" / "planning.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in waits] == ["iteration", "1", "2", "3", "4"]
    assert {line.split(",")[2] for line in waits[1:]} == {"1"}

    words = flags(corpus, **common, load=first, ckpt_step=1, save=again, epp_record=again / "plans")
    resumed = trained(words, 4)
    assert "iteration 2, replica 1: planned by packing, as before the resume" in resumed.output
    assert (again / FALLBACKS_FILE).read_text() == text
    planners = []
    for iteration in (2, 3, 4):
        name = f"iteration-00000{iteration}.step"
        before, now = ((folder / "plans" / name).read_text() for folder in (first, again))
        assert before == now
        planners.append([plan.predicted.planner for plan in Step.parse(now).plans])
    assert planners == [["epp", "packing"], ["epp", "epp"], ["epp", "epp"]]
    assert resumed.grad_norms == died.grad_norms[1:]
    assert resumed.losses[-1] == died.losses[-1]

    # Without the file the planner, which lives, is asked.
    (first / FALLBACKS_FILE).unlink()
    shutil.rmtree(again)
    words = flags(corpus, **common, load=first, ckpt_step=1, epp_record=again / "plans")
    forgot = trained(words, 4)
    assert len(forgot.losses) == 3
    step = Step.parse((again / "plans" / "iteration-000002.step").read_text())
    assert [plan.predicted.planner for plan in step.plans] == ["epp", "epp"]
