"""A planner that hangs or dies: what is said, how long it is waited for, what is left of it."""

import os
import re
import signal
import tempfile

import pytest

from megatron_epp.control import planner_process
from megatron_epp.control.planner_process import PlannerFailed, PlannerProcess
from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.ir import Step
from megatron_epp.planner import Options

COST = Cost(
    StageLayout(
        without_states(profile(Model("m", 4, 32, 64, 4, 2, 8, 128, gated=True), DEVICES["cpu"])),
        (2, 2),
    ),
    (1e12, 1e12),
)


@pytest.fixture
def planner(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = PlannerProcess(COST, Options(context=4096), "packing", 1)
    yield made
    made.close()


def test_a_planner_is_started_anew_and_leaves_nothing_behind(planner, tmp_path) -> None:
    assert os.listdir(tmp_path) == []  # its cost model has no name, so nobody has to remove it
    planner.ask("iteration 1 x", [900, 30], False)
    assert Step.parse(planner.reply("iteration 1 x")["step"]).lengths == (900, 30)
    os.kill(planner.pid, signal.SIGKILL)
    with pytest.raises(PlannerFailed, match="has ended"):
        planner.ask("iteration 2 x", [900, 30], False)
        planner.reply("iteration 2 x")
    planner.ask("iteration 3 x", [800, 30], False)
    assert Step.parse(planner.reply("iteration 3 x")["step"]).lengths == (800, 30)
    assert os.listdir(tmp_path) == []


def test_a_planner_that_hangs_is_told_of_and_left_behind(planner, monkeypatch, caplog) -> None:
    assert planner.patience_seconds == planner_process.MOST_PATIENCE_SECONDS
    planner.iteration_seconds = 100.0
    assert planner.patience_seconds == planner_process.MOST_PATIENCE_SECONDS
    planner.iteration_seconds = 12.0
    assert planner.patience_seconds == 12.0 * planner_process.PATIENCE_ITERATIONS
    planner.iteration_seconds = 0.01
    assert planner.patience_seconds == planner_process.LEAST_PATIENCE_SECONDS
    assert planner_process.SILENCE_SECONDS < planner_process.LEAST_PATIENCE_SECONDS
    monkeypatch.setattr(planner_process, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(planner_process, "LEAST_PATIENCE_SECONDS", 1.2)
    os.kill(planner.pid, signal.SIGSTOP)
    planner.ask("iteration 7 x", [900, 30], False)
    with pytest.raises(PlannerFailed, match=r"^no plan within 1 s$"):
        planner.reply("iteration 7 x")
    (line,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(
        r"iteration 7: training waits for its plan for \d+ s; after 1 s it goes on without the "
        "planner",
        line,
    )
    assert planner.pid is None
