"""Planner processes of a replica: how many, which iteration each, what is discarded; waiting."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from megatron_epp.control import planner_pool
from megatron_epp.control.planner_pool import PlannerPool
from megatron_epp.control.step_source import Planning
from megatron_epp.control.waits import WATCHED, Waits
from megatron_epp.ir import StepPart
from megatron_epp.planner.options import Options
from megatron_epp.planner.process import Answer, PlannerSettings, plan_text
from megatron_epp.runtime.groups import planning_ranks
from tests.planner.cases import machine


class Process:
    """A planner process that takes ``seconds`` for a plan, by a clock that the test moves."""

    made: ClassVar[list["Process"]] = []
    seconds, now = 1.0, 0.0

    def __init__(self) -> None:
        self.asked: dict[str, float] = {}
        self.forgotten: list[str] = []
        self.iteration_seconds = None
        self.closed, self.free_at = False, 0.0
        Process.made.append(self)

    def ask(self, name, lengths, forward_only) -> None:
        if name not in self.asked:
            self.free_at = max(self.free_at, Process.now) + Process.seconds
            self.asked[name] = self.free_at

    def reply(self, name) -> Answer:
        Process.now = max(Process.now, self.asked.pop(name))
        return Answer(name, Process.seconds, name, "")

    def forget(self, name) -> None:
        self.forgotten.append(name)

    def close(self) -> None:
        self.closed = True

    @property
    def unanswered(self) -> int:
        return sum(ready > Process.now for ready in self.asked.values())


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    Process.made, Process.now, Process.seconds = [], 0.0, 1.0
    monkeypatch.setattr(planner_pool, "time", SimpleNamespace(monotonic=lambda: Process.now))


def trained(pool: PlannerPool, iterations: range, iteration_seconds: float) -> list[float]:
    """Seconds that each of the iterations waited for its plan."""
    waited = []
    for iteration in iterations:
        before = Process.now
        pool.reply(iteration, [iteration], False)
        waited.append(Process.now - before)
        for later in range(1, pool.ahead + 1):
            pool.ask(iteration + later, [iteration + later])
        Process.now += iteration_seconds
    return waited


@pytest.mark.parametrize(
    ("planning", "most", "processes", "waits"),
    [
        (0.5, 8, 1, 0.0),
        (3.5, 8, 5, 0.0),  # a margin of a quarter: 4.4 iterations go by while one is planned
        (3.5, 2, 2, 0.75),  # of two processes, each 3.5 s for 2 iterations
    ],
)
def test_as_many_processes_as_planning_takes(planning, most, processes, waits) -> None:
    Process.seconds = planning
    pool = PlannerPool(Process, most)
    assert trained(pool, range(1, 2), 1.0) == [planning]  # nothing was ahead
    trained(pool, range(2, 20), 1.0)
    settled = trained(pool, range(20, 40), 1.0)
    assert sum(settled) / len(settled) == pytest.approx(waits, abs=0.01)
    assert len(pool.processes) == pool.ahead == processes
    assert pool.discarded == 0
    # Iterations that have grown long need fewer ahead.
    trained(pool, range(40, 60), 100.0)
    assert pool.ahead == 1


class Answering(Process):
    """A planner process that really plans."""

    settings = PlannerSettings(machine(pp=2), Options(effort=0), "epp", 2, 1)

    def ask(self, name, lengths, forward_only) -> None:
        super().ask(name, lengths, forward_only)
        self.lengths = {**getattr(self, "lengths", {}), name: lengths}

    def reply(self, name) -> Answer:
        text = plan_text(self.settings, self.lengths[name], False)
        return super().reply(name)._replace(step=text)


def test_a_plan_is_the_same_text_whatever_is_planned_beside() -> None:
    Process.seconds = 3.5

    def texts(most: int) -> list[str]:
        pool, found = PlannerPool(Answering, most), []
        for iteration in range(1, 11):
            found.append(pool.reply(iteration, batch(iteration), False).step)
            for later in range(1, pool.ahead + 1):
                pool.ask(iteration + later, batch(iteration + later))
            Process.now += 1.0
        assert len(pool.processes) == min(most, 5)
        return found

    def batch(iteration: int) -> list[int]:
        return [1 + iteration * number % 977 for number in range(40, 52)]

    one = texts(1)
    assert texts(8) == one and len(set(one)) == len(one)
    assert StepPart.parse(one[0]).first == 1


def test_what_is_ahead_is_discarded_and_counted() -> None:
    Process.seconds = 3.5
    pool = PlannerPool(Process, 8)
    trained(pool, range(1, 20), 1.0)
    # A resume skips, or a batch is another one than was foreseen.
    pool.reply(22, [22], False)
    assert pool.discarded == 2  # 20 and 21
    assert sum(len(process.forgotten) for process in Process.made) == 2
    pool.took(7.0)
    ahead = [name for process in Process.made for name in process.asked]
    before = list(pool.processes)
    pool.restart()
    assert all(process.closed for process in before)
    assert len(pool.processes) == len(before) and not set(pool.processes) & set(before)
    assert {process.iteration_seconds for process in pool.processes} == {7.0}
    assert pool.discarded == 2 + len([name for name in ahead if int(name.split()[1]) > 22])


def test_a_host_plans_for_as_few_replicas_as_can_be() -> None:
    # Two pipeline ranks, eight replicas, four ranks a host: ranks of replica r are r and 8 + r.
    hosts, blocks = [f"host {rank // 4}" for rank in range(16)], [rank % 8 for rank in range(16)]
    chosen = planning_ranks(hosts, blocks)
    assert all(blocks[rank] == block for block, rank in chosen.items()) and len(chosen) == 8
    on_hosts = [hosts[rank] for rank in chosen.values()]
    assert sorted(map(on_hosts.count, set(on_hosts))) == [2, 2, 2, 2]
    assert planning_ranks(["a", "a"], [0, 0]) == {0: 0}


def test_waiting_is_told_once_with_the_remedy() -> None:
    waits = Waits()
    assert waits.see(Planning(100.0, 1), 1.0) == []  # the first: nothing could be ahead
    told = [waits.see(Planning(0.04, 1), 1.0) for _ in range(WATCHED + 5)]
    assert [bool(lines) for lines in told] == [False] * (WATCHED - 1) + [True] + [False] * 5
    (line,) = told[WATCHED - 1]
    assert line == (
        "training waited for its plans 4% of the last 20 iterations: give --epp-plan-cores more "
        "cores, or --epp-effort less"
    )
    for _ in range(WATCHED):
        assert waits.see(Planning(0.0, 1), 1.0) == []
    again = [line for _ in range(WATCHED) for line in waits.see(Planning(0.5, 0), 1.0)]
    assert len(again) == 1 and again[0].endswith("leave --no-epp-plan-ahead out")
