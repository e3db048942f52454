"""Progress bars of long searches."""

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
    return REAL(**(named | {"delay": 0, "mininterval": 0, "miniters": 0, "disable": False}))


REAL = tqdm.tqdm


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
