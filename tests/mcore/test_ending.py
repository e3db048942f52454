"""Jobs end together, refused or struck: status 2 on every refused rank, one line from one of them;
a rank that ends in an emergency first finishes its checkpoint, within a bound."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from megatron.training import async_utils, global_vars

from megatron_epp import pretrain_gpt, pretrain_hybrid
from megatron_epp.mcore.job import emergency_exit, job_exit
from megatron_epp.mcore.job.emergency_exit import LEAST_SECONDS, Saves
from megatron_epp.mcore.trainer import entry, launcher
from megatron_epp.runtime.executor import LinkLost
from tests.mcore.runs import PROGRAM, ROOT, command, environment, flags, train, trained
from tests.programs import Done, python
from tests.waiting import until

pytestmark = pytest.mark.everything

LENGTHS = [60, 50, 40, 30, 20, 128] * 20


def runs(pid: int) -> bool:
    """Whether a process is there and not merely unburied."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def program(text: str) -> Done:
    """A program of its own, which imports this checkout."""
    return python("-c", text, PYTHONPATH=str(ROOT))


# ------------------------------------------------------------------ checkpoints in an emergency


class Timer:
    """As Megatron's timer around a save looks."""

    def __init__(self, started: bool = False, seconds: float = 0.0):
        self._started, self.seconds = started, seconds

    def active_time(self) -> float:
        return self.seconds


@pytest.fixture
def megatron(monkeypatch) -> SimpleNamespace:
    """Megatron's timers, asynchronous saves (none) and handler of signals (none), and a clock that
    only sleeping moves; ``ends`` is when a save ends."""
    timers = {"save-checkpoint": Timer()}
    seen = SimpleNamespace(timers=timers, seconds=0.0, ends=None)

    def sleep(seconds: float) -> None:
        seen.seconds += seconds
        if seen.ends is not None and seen.seconds >= seen.ends:
            for timer in timers.values():
                timer._started = False

    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", SimpleNamespace(_timers=timers))
    monkeypatch.setattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", None)
    monkeypatch.setattr(async_utils, "_async_calls_queue", None)
    clock = SimpleNamespace(monotonic=lambda: seen.seconds, sleep=sleep)
    monkeypatch.setattr(emergency_exit, "time", clock)
    return seen


@pytest.mark.parametrize(
    ("timer", "last", "ends", "waited"),
    [
        (None, 0.0, None, 0.0),
        ("save-checkpoint", 0.0, 20.0, 20.0),
        ("save-checkpoint-non-persistent", 0.0, 20.0, 20.0),
        # No longer than 60 s or three times the last save, not the sum of all.
        ("save-checkpoint", 5.0, None, LEAST_SECONDS),
        ("save-checkpoint", 100.0, None, 300.0),
    ],
)
def test_a_save_is_waited_for_within_a_bound(megatron, timer, last, ends, waited) -> None:
    saves = Saves()
    assert not saves.under_way()
    for seconds in (1000.0, last):
        megatron.timers["save-checkpoint"].seconds += seconds if last else 0.0
        saves.look()
    if timer is not None:
        megatron.timers.setdefault(timer, Timer())._started = True
    megatron.ends = ends
    saves.wait()
    assert waited <= megatron.seconds < waited + 1


def test_the_first_save_says_what_it_resumes_with(megatron, capsys) -> None:
    saves, timer = Saves(), megatron.timers["save-checkpoint"]
    saves.first_line = "--save a: checkpoints resume with any degrees"
    said = []
    for seconds in (0.0, 3.0, 3.0, 9.0):
        timer.seconds = seconds
        saves.look()
        said.append(capsys.readouterr().out)
    assert said == ["", "--save a: checkpoints resume with any degrees\n", "", ""]


def test_a_handled_signal_and_an_asynchronous_save_count(megatron, monkeypatch) -> None:
    saves = Saves()
    saves.ask()  # nobody asked for a signal to be handled
    assert not saves.under_way()
    handler = SimpleNamespace(_signal_received=False)
    monkeypatch.setattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", handler)
    assert not saves.under_way()
    saves.ask()
    assert handler._signal_received and saves.under_way()
    handler._signal_received = False
    left = [2]
    queue = SimpleNamespace(get_num_unfinalized_calls=lambda: left[0])
    monkeypatch.setattr(async_utils, "_async_calls_queue", queue)
    assert saves.pending() and saves.under_way()
    left[0] = 0
    assert not saves.under_way()


@pytest.mark.parametrize(
    ("error", "met", "finished"),
    [(ValueError("bad"), 2, True), (ValueError("bad"), 1, False), (LinkLost("gone"), 2, False)],
)
def test_refused_ranks_finish_their_asynchronous_saves_together(
    megatron, monkeypatch, error, met, finished
) -> None:
    done: list[object] = []
    queue = SimpleNamespace(get_num_unfinalized_calls=lambda: 1)
    monkeypatch.setattr(async_utils, "_async_calls_queue", queue)
    monkeypatch.setattr(async_utils, "maybe_finalize_async_save", lambda blocking: done.append(1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(job_exit, "_may_report", lambda lost: (False, False))
    store = SimpleNamespace(add=lambda key, number: met)
    monkeypatch.setattr(job_exit, "_meeting_place", lambda: store)
    monkeypatch.setattr(job_exit, "end_now", lambda status: done.append(f"status {status}"))
    job_exit.refuse_and_exit(error)
    assert done == [1] * finished + [f"status {1 if isinstance(error, LinkLost) else 2}"]


# ------------------------------------------------------------------ a launcher that is gone


def test_a_launcher_that_is_gone_is_noticed_at_its_store(monkeypatch, capsys) -> None:
    """torchrun was killed before the rank's first line: the thread that watches cannot know."""
    ended: list[int] = []
    monkeypatch.setattr(job_exit, "end_now", ended.append)
    monkeypatch.setattr(job_exit, "PATIENCE_AT_START_SECONDS", 0.5)
    # A port at which nobody listens.
    for name, value in {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    job_exit.require_launcher()
    assert not ended
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    job_exit.require_launcher()
    assert ended == [job_exit.FAILED]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "megatron_epp" in line]
    assert line.startswith("megatron_epp: rank 1 ends: torchrun is gone (its store on 127.0.0.1")


LAUNCHER = """
import os, subprocess, sys
rank = [sys.executable, "-c", '''
import sys, time
from megatron_epp.mcore.trainer.launcher import end_with_launcher
end_with_launcher()
print("torch" in sys.modules, flush=True)
time.sleep(3600)  # imports
''']
own = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3"}
started = subprocess.Popen(rank, env={**os.environ, **own}, start_new_session=True,
                           stdout=subprocess.PIPE)
print(started.stdout.readline())
"""


def test_a_rank_watches_its_launcher_before_it_imports_anything_slow(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(launcher, "end_with_launcher", lambda: order.append("watches"))
    monkeypatch.setattr(entry, "main", lambda *_, **__: order.append("trains"))
    for script in (pretrain_gpt, pretrain_hybrid):
        script.run()
    assert order == ["watches", "trains"] * 2
    done = program(LAUNCHER)
    assert "False" in done.stdout
    # The pipe's end is reached when the rank, which has it too, is gone.
    assert "megatron_epp: rank 3 ends: torchrun (process " in done.stderr


SIGTERM = """
import os, signal, subprocess, time
from megatron_epp.mcore.trainer.sigterm import report_when_terminated
from megatron_epp.runtime.executor import CurrentOp
report_when_terminated(CurrentOp(0), 0)
writer = subprocess.Popen(["sleep", "3600"])
print(writer.pid, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(3600)
"""


def test_the_last_words_of_a_terminated_rank_leave_no_child() -> None:
    done = program(SIGTERM)
    assert done.returncode == 143 and "rank 0 terminated: pipeline rank 0" in done.stderr
    assert not runs(int(done.stdout))


# ------------------------------------------------------------------ who reports


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
def test_rank_0_has_the_word_before_another_can_count_it(monkeypatch, rank, speaks):
    """Two ranks: the other acts in full as soon as this one is counted."""
    counts = {job_exit._REFUSED: 0, job_exit._REPORTED: 0}

    class Store:
        def add(self, key: str, number: int) -> int:
            counts[key] += number
            mine = counts[key]
            if key == job_exit._REFUSED and number and rank == 0:
                counts[job_exit._REFUSED] += 1
                counts[job_exit._REPORTED] += 1  # the other's, which finds it taken or is first
            elif key == job_exit._REFUSED and number:
                counts[job_exit._REPORTED] += 1  # rank 0's, before it is counted
                counts[job_exit._REFUSED] += 1
            return mine

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(job_exit, "_meeting_place", Store)
    assert job_exit._may_report()[0] is speaks


SERVE = """
import sys, time, torch
store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_reports_its_error_if_the_store_is_stopped_or_gone(monkeypatch, lost):
    """Gone with rank 0, which has a refusal, too, and reports it: then only if it has lost it."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def gone() -> None:
        raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(job_exit, "_meeting_place", gone)
    assert job_exit._may_report(lost) == (lost, lost)
    with psutil.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            store = torch.distributed.TCPStore("localhost", port)
            server.suspend()
            until(lambda: server.status() == psutil.STATUS_STOPPED)
            monkeypatch.setattr(job_exit, "_meeting_place", lambda: store)
            monkeypatch.setattr(job_exit, "PATIENCE_AT_START_SECONDS", 0.1)
            monkeypatch.setattr(job_exit, "ANSWER_SECONDS", 0.1)
            assert job_exit._may_report(lost) == (True, True)
        finally:
            server.kill()


REFUSE = """
import os, subprocess, sys, time
from pathlib import Path
import torch
from megatron_epp.mcore.job import job_exit
from megatron_epp.runtime.executor import LinkLost
from tests.waiting import until
rank = int(os.environ["RANK"])
if {group}:
    torch.distributed.init_process_group("gloo")
if rank < {late}:
    until(Path(__file__).with_name("refused").exists)
Path(__file__).with_name("refused").touch()
if rank >= {first}:
    started = subprocess.Popen(["sleep", "3601"])
    print("rank", rank, "started", started.pid, flush=True)
    job_exit.refuse_and_exit({error}("rank %d was given a bad plan" % rank))
time.sleep(3600)
"""


@pytest.mark.parametrize(
    "how",
    [
        {"group": False},
        {"group": True},
        {"late": 0, "first": 1},
        {"late": 0, "first": 1, "error": "LinkLost"},
    ],
)
def test_refused_ranks_leave_with_status_2_and_rank_0_speaks(tmp_path, how):
    """Or rank 1, where it alone is refused, and then says so. torchrun itself ends jobs in the two
    tests of signals below."""
    how = {"group": True, "late": 1, "first": 0, "error": "ValueError", **how}
    file = tmp_path / "program.py"
    file.write_text(REFUSE.format(**how))
    done = train([], processes=2, program=(str(file),))
    (line,) = done.errors
    said = f"megatron_epp: error: rank {how['first']} was given a bad plan"
    if how["first"]:
        assert line.startswith(f"{said} (rank 1 on ")
        assert (1 if how["error"] == "LinkLost" else 2) in done.statuses and done.status
    else:
        assert line == said and done.statuses == (2, 2)
    started = re.findall(r"rank \d started (\d+)", done.output)
    assert len(started) == 2 - how["first"]
    assert not [pid for pid in map(int, started) if runs(pid)]


# ------------------------------------------------------------------ signals to a whole job


@contextmanager
def started(words: list[str], log: Path) -> Iterator[psutil.Popen]:
    """torchrun, whose two ranks have trained two iterations."""
    with log.open("w") as said:
        launched = psutil.Popen(words, cwd=ROOT, env=environment(2), stdout=said, stderr=said)
    try:
        until(lambda: "iteration        2/" in log.read_text(), log.read_text)
        yield launched
    finally:
        with suppress(psutil.NoSuchProcess):
            launched.kill()
            launched.wait()


def test_ranks_and_planner_end_when_their_launcher_is_killed(corpus, tmp_path):
    """Also those behind a wrapper, whose parent lives on."""
    wrapper, log = tmp_path / "run.sh", tmp_path / "log"
    wrapper.write_text(f'#!/bin/bash\n"{sys.executable}" "$@"\necho $? >> {tmp_path}/status\n')
    wrapper.chmod(0o755)
    words = command(flags(corpus, epp=True, epp_plan_ahead=True, train_iters=100000), 2, PROGRAM)
    at = words.index(PROGRAM[1]) - 1
    words[at:at] = ["--no-python", str(wrapper)]
    with started(words, log) as launched:
        children = launched.children(recursive=True)
        assert sum("megatron_epp.planner.process" in process.cmdline() for process in children) == 1
    until(lambda: not any(runs(process.pid) for process in children))
    # The second one may find the first one's connection closed before it looks itself.
    assert log.read_text().count("ends: torchrun") >= 1
    assert (tmp_path / "status").read_text() == "1\n1\n"


def test_a_signal_to_launcher_and_ranks_leaves_a_whole_checkpoint(corpus, tmp_path):
    """As a batch system signals a step: torchrun dies of it, the ranks save first and then end."""
    save, log = tmp_path / "save", tmp_path / "log"
    kept = {"epp": True, "train_iters": 1000, "save": save, "save_interval": 1000}
    handled = {"exit_signal_handler": True, "exit_signal": "SIGUSR2"}
    with started(command(flags(corpus, **kept, **handled), 2, PROGRAM), log) as launched:
        ranks = launched.children()
        assert len(ranks) == 2
        for process in (launched, *ranks):
            process.send_signal(signal.SIGUSR2)
        assert launched.wait() == -signal.SIGUSR2
        until(lambda: not any(runs(process.pid) for process in ranks), log.read_text)
    last = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert f"saved checkpoint from iteration {last:7d}" in log.read_text()
    resumed = trained(flags(corpus, **kept, load=save, exit_interval=last + 1))
    assert f"iteration {last + 1:8d}/" in resumed.output
