"""Progress bars of long searches, their processes, and what an interrupt leaves."""

import io
import os
import re
import sys
from typing import Any

import pytest
import tqdm

from megatron_epp.cli import compare
from megatron_epp.cli.options import parse
from megatron_epp.cli.plan import run
from megatron_epp.cli.progress import Workers
from tests.cli.commands import Commands

PLAN = (
    "plan --lengths wlb --model llama3-8b --device h100-80g --pp 4 --tp 2 --context 32768"
    " --global-batch-size 24 --placement even"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_once(**named: Any) -> tqdm.std.tqdm:
    return REAL(**(named | {"delay": 0, "mininterval": 0, "miniters": 0, "disable": False}))


REAL = tqdm.tqdm


@pytest.mark.everything
def test_the_search_of_one_plan_has_a_bar_by_its_effort(monkeypatch, capsys) -> None:
    assert run(parse(PLAN.split())) == 0
    plan = capsys.readouterr().out
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr("tqdm.tqdm", at_once)
        patched.setattr(sys, "stderr", terminal)
        assert run(parse(PLAN.split())) == 0
    shares = [int(share) for share in re.findall(r"planning: +(\d+)%", terminal.getvalue())]
    assert len(set(shares)) > 3 and shares == sorted(shares) and 0 < shares[-1] <= 100
    assert re.search(r"planning: .*\d\d:\d\d<\d\d:\d\d", terminal.getvalue())
    assert capsys.readouterr().out == plan


def test_several_tasks_are_counted_and_a_file_gets_a_line_a_minute(monkeypatch, capsys) -> None:
    for stream, seconds in (Terminal(), 2), (io.StringIO(), 60):
        seen: list[dict[str, Any]] = []

        def noted(seen: list[dict[str, Any]] = seen, **named: Any) -> tqdm.std.tqdm:
            seen.append(named)
            return at_once(**named)

        with monkeypatch.context() as patched, Workers() as workers:
            patched.setattr("tqdm.tqdm", noted)
            patched.setattr(sys, "stderr", stream)
            assert list(workers.watched("replicas")(abs, [(-1,), (-2,)])) == [1, 2]
        assert "2/2" in stream.getvalue()
        assert [named["delay"] for named in seen] == [seconds]
        assert [named.get("mininterval", 0.1) for named in seen] == [60 if seconds == 60 else 0.1]


def test_an_interrupt_leaves_what_is_found(monkeypatch, cli: Commands) -> None:
    alone, calls = Workers.__call__, []

    def interrupted(self, function, tasks):
        for result in alone(self, function, tasks):
            yield result
            calls.append(result)
            if len(calls) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "__call__", interrupted)
    machine = "--model llama3-8b --device h100-80g --gpus 8 --effort 0"
    shown = cli.ran(f"tune --lengths spread {machine} --global-batch-size 8", 130).out
    assert shown.startswith("Interrupted: this is what was found until then") and "\n1 " in shown


def test_an_interrupted_comparison_shows_the_batches_that_are_done(
    monkeypatch, cli: Commands
) -> None:
    real, calls = compare.outcome, []

    def interrupted(number: int, *job, **options):
        calls.append(number)
        if len(calls) == 6:  # two warm up; the second planner of the second batch
            raise KeyboardInterrupt
        return real(number, *job, **options)

    monkeypatch.setattr(compare, "outcome", interrupted)
    machine = "--model llama3-8b --device h100-80g --pp 2 --tp 4 --planner packing seq1f1b"
    job = f"compare --lengths spread --batches 3 --global-batch-size 4 {machine}"
    shown = cli.ran(job, 130)
    assert "Interrupted: 1 of 3 batches." in shown.err
    assert "batches  0 to 0" in shown.out and "Best: " in shown.out and "1/1" in shown.out


def _numbered(number: int, *_: object) -> int:
    if number < 0:
        raise ValueError(f"number {number}")
    return number


def test_processes_give_the_results_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_epp.cli.progress._ALONE", -1.0)
    tasks = [(number, "x" * 1000) for number in range(40)]
    with Workers() as workers:
        workers._cores = 2
        assert list(workers(_numbered, tasks)) == list(range(40))
        assert workers._pool is not None
        with pytest.raises(ValueError, match="number -3"):
            list(workers(_numbered, [(1,), (-3,)]))
        with pytest.raises(MemoryError, match="a process that plans was killed"):
            list(workers(os._exit, [(1,), (1,)]))
    with Workers() as workers:
        workers._cores = 1
        assert list(workers(_numbered, tasks)) == list(range(40)) and workers._pool is None
