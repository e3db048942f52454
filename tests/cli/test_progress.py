"""What a long command shows while it runs, its processes, and what an interrupt leaves."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tqdm

from megatron_epp.cli import compare
from megatron_epp.cli.options import parse
from megatron_epp.cli.plan import run
from megatron_epp.cli.progress import Workers
from tests.cli.commands import Commands
from tests.programs import ROOT
from tests.waiting import until

PLAN = (
    "plan --lengths wlb --model llama3-8b --device h100-80g --pp 4 --tp 2 --context 32768"
    " --global-batch-size 24 --placement even"
)


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of a bar whenever it advances."""
    texts: list[str] = []
    real = tqdm.tqdm

    class Noted(real):
        def update(self, n: float = 1) -> None:
            super().update(n)
            texts.append(str(self))

    monkeypatch.setattr("tqdm.tqdm", lambda **named: Noted(**named, disable=False))
    return texts


@pytest.mark.everything
def test_the_search_of_one_plan_has_a_bar_by_its_effort(advanced, capsys) -> None:
    assert run(parse(PLAN.split())) == 0
    shares = [int(share) for share in re.findall(r"planning: +(\d+)%", "\n".join(advanced))]
    assert len(set(shares)) > 3 and shares == sorted(shares) and 0 < shares[-1] <= 100
    assert re.search(r"planning: .*\d\d:\d\d<\d\d:\d\d", advanced[-1])


def test_several_tasks_are_counted(advanced) -> None:
    with Workers() as workers:
        assert list(workers.watched("replicas")(abs, [(-1,), (-2,)])) == [1, 2]
    assert [re.findall(r"replicas: .* (\d/\d) ", text) for text in advanced] == [["1/2"], ["2/2"]]


# A command line, with a function that waits until the test has seen what is shown.
SLOWED = """
import functools, importlib, sys, time
from pathlib import Path
from megatron_epp.__main__ import main
from megatron_epp.cli import progress

progress._IN_A_FILE = (0.0, 0.2)
module, name, *words = sys.argv[1:]
module = importlib.import_module(module)
function = getattr(module, name)

@functools.wraps(function)
def slowed(*args, **named):
    while not Path("seen").exists():
        time.sleep(0.01)
    return function(*args, **named)

setattr(module, name, slowed)
sys.exit(main(words))
"""
JOB = "--lengths lengths --model gpt-7b --device a100-80g --effort 0"
TUNED = f"tune {JOB} --gpus 8 --global-batch-size 7 --batches 1 --tp 8"
SEARCHES = {
    "a corpus": ("megatron_epp.cli.documents open_corpus", f"plan {JOB} --pp 2", "reading the"),
    "plan": (
        "megatron_epp.planner.epp.planner _searched",
        f"plan {JOB} --pp 2 --cp 8 --placement even --vocab-parallel off",
        "planning:",
    ),
    "compare": ("megatron_epp.cli.compare outcome", f"compare {JOB} --pp 2 --cp 8", "warm-up:"),
    "bounds": ("megatron_epp.planner.tuning.survey _bound", TUNED, "bounds:"),
    "tune": ("megatron_epp.planner.tuning.survey _look_at", TUNED, "first plans:"),
    "its files": ("megatron_epp.cli.tune.command tuning_lines", TUNED, "tune, "),
}


def started(slow: str, line: str, stderr: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    return subprocess.Popen(
        [sys.executable, "-c", SLOWED, *slow.split(), *line.split()],
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=stderr,
        stderr=stderr,
    )


class Terminal:
    """A pseudo-terminal, and what a program has written there."""

    def __init__(self) -> None:
        self.ours, self.its = pty.openpty()
        self.text = ""

    def read(self) -> bool:
        """Read once; false: the program has ended."""
        try:
            more = os.read(self.ours, 1 << 16)
        except OSError:  # Linux: the other side is closed
            more = b""
        self.text += more.decode()
        return bool(more)

    @property
    def lines(self) -> list[str]:
        """What is to be seen: what follows a return overwrites what was there."""
        shown = []
        for line in self.text.replace("\r\n", "\n").split("\n"):
            seen = ""
            for part in line.split("\r"):
                seen = part + seen[len(part) :]
            shown.append(seen.rstrip())
        return shown


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    os.close(made.ours)


def marks(name: str) -> list[pytest.MarkDecorator]:
    """The first tier has one search; each starts a command that compiles."""
    return [] if name == "tune" else [pytest.mark.everything]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in SEARCHES])
def test_a_long_step_is_shown_on_a_terminal(name: str, terminal: Terminal) -> None:
    """Although no bar advances meanwhile; of what was shown nothing stays behind."""
    slow, line, shown = SEARCHES[name]
    process = started(slow, line, terminal.its)
    os.close(terminal.its)
    until(lambda: shown in terminal.text or not terminal.read())
    Path("seen").touch()
    while terminal.read():
        pass
    assert process.wait() == 0, terminal.text
    left = [each for each in terminal.lines if re.search(r"[, [<]00:[0-9]{2}\b|it/s", each)]
    assert not left and shown not in "\n".join(terminal.lines)
    assert any(line.startswith(("Best: ", "iteration ")) for line in terminal.lines)


def test_a_file_gets_lines(folder: Path) -> None:
    slow, line, shown = SEARCHES["tune"]
    with open("log", "wb") as log:
        process = started(slow, line, log.fileno())
    try:
        until(lambda: Path("log").read_text().count(f"\n{shown}") >= 2)
    finally:
        Path("seen").touch()
    assert process.wait() == 0
    assert "\r" not in Path("log").read_text() and "\nBest: " in Path("log").read_text()


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
