"""Planner processes: the plan is that of this process; what happens if one hangs, dies or fails."""

import os
import re
import signal
import subprocess
import sys
from multiprocessing import Pipe

import pytest

from megatron_epp.control import planner_process
from megatron_epp.control.planner_process import PlannerFailed, PlannerProcess, PlannerRefused
from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.ir import StepPart
from megatron_epp.planner import replicas
from megatron_epp.planner.options import ALL, Options, default_levers
from megatron_epp.planner.process import PlannerSettings, Request, answer
from megatron_epp.planner.replicas import evaluation_part, plan_part

COST = Cost(
    StageLayout(
        without_states(profile(Model("m", 4, 32, 64, 4, 2, 8, 128, gated=True), DEVICES["cpu"])),
        (2, 2),
    ),
    (1e12, 1e12),
)
LENGTHS = [4096, 900, 41, 7000, 20, 16000, 300, 2500]


@pytest.fixture
def planner():
    made = PlannerProcess(COST, Options(context=4096), "packing", 1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("model", "layout", "lockstep", "place"),
    [
        ("gpt-oss-20b", {"pp": 2, "tp": 8, "ep": 4}, 1, (1, 0)),
        ("qwen3-30b-a3b", {"pp": 4, "tp": 8, "dp": 2, "ep": 16}, 2, (2, 0)),
        ("llama3-8b", {"pp": 2, "tp": 2, "cp": 2, "memory_budget_gib": 100 / 3}, 1, (4, 3)),
    ],
    ids=["kinds of layers", "lockstep groups", "budget that no decimal text has"],
)
def test_its_plans_are_those_of_this_process(model, layout, lockstep, place) -> None:
    cost = named_cost(model, "h100-80g", **layout, logits_held=False)
    cost = cost.replace(multiple=layout["tp"], host_budget_bytes=2e11 / 3)
    levers = ALL if lockstep > 1 else default_levers("h100-80g", True)
    options = Options(context=16384, levers=levers, effort=0, lockstep=lockstep)
    here = plan_part(LENGTHS, cost, options, "epp", *place)  # first, so that tables are cached
    process = PlannerProcess(cost, options, "epp", *place)
    try:
        for forward_only in (False, True):
            process.ask(f"iteration 1 {forward_only}", LENGTHS, forward_only)
        assert process.reply("iteration 1 False").step == str(here)
        assert all(plan.predicted is not None for plan in here.plans)
        evaluated = evaluation_part(LENGTHS, cost, options, *place)
        assert process.reply("iteration 1 True").step == str(evaluated)
    finally:
        process.close()


@pytest.mark.everything
def test_a_planner_is_started_anew(planner) -> None:
    def planned(name: str, lengths: list[int]) -> tuple[int, ...]:
        planner.ask(name, lengths, False)
        return StepPart.parse(planner.reply(name).step).plans[0].documents

    assert planned("iteration 1 x", [900, 30]) == (900, 30)
    os.kill(planner.pid, signal.SIGKILL)
    with pytest.raises(PlannerFailed, match="has ended"):
        planned("iteration 2 x", [900, 30])
    assert planned("iteration 3 x", [800, 30]) == (800, 30)
    # Documents that cannot be planned are no failure, and the process goes on.
    with pytest.raises(PlannerRefused, match="expected at least 1"):
        planned("iteration 4 x", [0])
    pid = planner.pid
    planner.ask("iteration 5 x", [700], False)
    planner.forget("iteration 5 x")
    assert planned("iteration 6 x", [600, 30]) == (600, 30)
    assert (planner.unanswered, planner.pid) == (0, pid)


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


def test_any_error_becomes_an_answer(monkeypatch) -> None:
    def crash(*_):
        raise ZeroDivisionError("a bug\nwith two lines")

    monkeypatch.setattr(replicas, "plan_part", crash)
    settings = PlannerSettings(COST, Options(), "epp", 1, 0)
    failed = answer(settings, Request("iteration 1 x", [900], False))
    assert (failed.name, failed.step, failed.error) == (
        *("iteration 1 x", ""),
        "ZeroDivisionError: a bug",
    )


def test_it_ends_with_its_trainer_in_the_midst_of_a_plan_and_without_torch() -> None:
    program = (
        "import sys; from megatron_epp.planner import process; sys.argv[1] = sys.argv[-1];"
        "replicas = __import__('megatron_epp.planner.replicas', fromlist=['plan_part']);"
        "made = replicas.plan_part;"
        "replicas.plan_part = lambda lengths, *others: made(lengths, *others) if len(lengths) < 9"
        " else print('torch' in sys.modules, flush=True) or __import__('time').sleep(600);"
        "process.main()"
    )
    pipe, end = Pipe()
    with end:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(end.fileno())],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[end.fileno()],
        )
    pipe.send(PlannerSettings(COST, Options(), "packing", 1, 0))
    pipe.send(Request("iteration 1 x", [64, 8], False))
    assert pipe.recv().error == ""
    pipe.send(Request("iteration 2 x", [64] * 9, False))
    assert child.stdout.readline() == "False\n"
    pipe.close()
    assert child.wait(120) == 0  # it would plan for 600 s
    child.stdout.close()
