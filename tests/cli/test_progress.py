"""Bars of what takes more than two seconds."""

import io
import re
import sys
from typing import Any

import tqdm

from megatron_epp.cli.options import parse
from megatron_epp.cli.plan import run
from megatron_epp.cli.progress import Workers

PLAN = (
    "plan --lengths wlb --model llama3-8b --device h100-80g --pp 4 --tp 2 --context 32768"
    " --global-batch-size 24"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_once(**named: Any) -> tqdm.std.tqdm:
    return REAL(**(named | {"delay": 0, "mininterval": 0, "miniters": 0}))


REAL = tqdm.tqdm


def test_the_search_of_one_plan_has_a_bar_by_its_effort(monkeypatch, capsys) -> None:
    assert run(parse(PLAN.split())) == 0
    plan = capsys.readouterr().out
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr("tqdm.tqdm", at_once)
        patched.setattr(sys, "stderr", terminal)
        assert run(parse(PLAN.split())) == 0
    shares = [int(share) for share in re.findall(r"replica: +(\d+)%", terminal.getvalue())]
    assert len(set(shares)) > 3 and shares == sorted(shares) and 0 < shares[-1] <= 100
    assert re.search(r"replica: .*\d\d:\d\d<\d\d:\d\d", terminal.getvalue())
    assert capsys.readouterr().out == plan


def test_a_bar_needs_a_terminal_and_several_tasks_are_counted(monkeypatch, capsys) -> None:
    for stream, shown in (Terminal(), "2/2"), (io.StringIO(), ""):
        with monkeypatch.context() as patched, Workers() as workers:
            patched.setattr("tqdm.tqdm", at_once)
            patched.setattr(sys, "stderr", stream)
            assert list(workers.watched("replicas")(abs, [(-1,), (-2,)])) == [1, 2]
        assert shown in stream.getvalue() and bool(shown) == bool(stream.getvalue())
