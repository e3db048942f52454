"""An emergency exit waits for the checkpoint that is being written, within a bound."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_epp import pretrain_gpt, pretrain_hybrid
from megatron_epp.mcore.job import emergency_exit, job_exit
from megatron_epp.mcore.job.emergency_exit import LEAST_SECONDS, Saves
from megatron_epp.mcore.trainer import entry, launcher
from megatron_epp.runtime.executor import LinkLost
from tests.mcore.runs import ROOT
from tests.mcore.test_ending import runs

pytestmark = pytest.mark.everything


class Timer:
    """As Megatron's timer around a save looks."""

    def __init__(self, started: bool = False, seconds: float = 0.0):
        self._started, self.seconds = started, seconds

    def active_time(self) -> float:
        return self.seconds


@pytest.fixture
def megatron(monkeypatch):
    """Megatron's global state, and a clock that only sleeping moves."""
    pytest.importorskip("megatron.training")
    import megatron.training.async_utils as async_utils
    import megatron.training.global_vars as global_vars

    timers = {"save-checkpoint": Timer()}
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", SimpleNamespace(_timers=timers))
    monkeypatch.setattr(global_vars, "_GLOBAL_SIGNAL_HANDLER", None)
    monkeypatch.setattr(async_utils, "_async_calls_queue", None)
    now = SimpleNamespace(seconds=0.0, events=[])

    def sleep(seconds: float) -> None:
        now.seconds += seconds
        for at, event in list(now.events):
            if now.seconds >= at:
                now.events.remove((at, event))
                event()

    clock = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(emergency_exit, "time", clock)
    return SimpleNamespace(
        timers=timers, now=now, global_vars=global_vars, async_utils=async_utils, patch=monkeypatch
    )


def test_nothing_is_waited_for_where_nothing_is_saved(megatron) -> None:
    saves = Saves()
    assert not saves.under_way()
    saves.wait()
    assert megatron.now.seconds == 0
    saves.ask()  # nobody asked for a signal to be handled
    assert not saves.under_way()


@pytest.mark.parametrize("name", ["save-checkpoint", "save-checkpoint-non-persistent"])
def test_a_save_is_waited_for(megatron, name) -> None:
    timer = megatron.timers[name] = Timer(started=True)
    megatron.now.events.append((20.0, lambda: setattr(timer, "_started", False)))
    Saves().wait()
    assert 20 <= megatron.now.seconds < 21


@pytest.mark.parametrize("last", [0.0, 5.0, 100.0])
def test_no_longer_than_the_bound(megatron, last) -> None:
    """The longer of 60 s and three times the last save, not the sum of all."""
    saves, timer = Saves(), megatron.timers["save-checkpoint"]
    timer.seconds = 1000.0
    saves.look()
    timer.seconds += last
    saves.look()
    timer._started = True
    saves.wait()
    bound = max(LEAST_SECONDS, 3 * (last or 1000.0))
    assert bound <= megatron.now.seconds < bound + 1


def test_the_first_save_says_what_it_resumes_with(megatron, capsys) -> None:
    saves, timer = Saves(), megatron.timers["save-checkpoint"]
    saves.first_line = "--save a: checkpoints resume with any degrees"
    said = []
    for seconds in (0.0, 3.0, 3.0, 9.0):
        timer.seconds = seconds
        saves.look()
        said.append(capsys.readouterr().out)
    assert said == ["", "--save a: checkpoints resume with any degrees\n", "", ""]


def test_a_handled_signal_and_an_asynchronous_save_count(megatron) -> None:
    saves = Saves()
    handler = SimpleNamespace(_signal_received=False)
    megatron.patch.setattr(megatron.global_vars, "_GLOBAL_SIGNAL_HANDLER", handler)
    assert not saves.under_way()
    saves.ask()
    assert handler._signal_received and saves.under_way()
    handler._signal_received = False
    left = [2]
    queue = SimpleNamespace(get_num_unfinalized_calls=lambda: left[0])
    megatron.patch.setattr(megatron.async_utils, "_async_calls_queue", queue)
    assert saves.pending() and saves.under_way()
    left[0] = 0
    assert not saves.under_way()


@pytest.mark.parametrize(
    ("error", "met", "finished"),
    [(ValueError("bad"), 2, True), (ValueError("bad"), 1, False), (LinkLost("gone"), 2, False)],
)
def test_refused_ranks_finish_their_asynchronous_saves_together(
    megatron, error, met, finished
) -> None:
    done: list[object] = []
    queue = SimpleNamespace(get_num_unfinalized_calls=lambda: 1)
    megatron.patch.setattr(megatron.async_utils, "_async_calls_queue", queue)
    finish = "megatron.training.async_utils.maybe_finalize_async_save"
    megatron.patch.setattr(finish, lambda blocking: done.append(blocking))
    megatron.patch.setenv("WORLD_SIZE", "2")
    megatron.patch.setattr(job_exit, "_may_report", lambda lost: (False, False))
    megatron.patch.setattr(
        job_exit, "_meeting_place", lambda: SimpleNamespace(add=lambda key, number: met)
    )
    megatron.patch.setattr(job_exit, "end_now", done.append)
    job_exit.refuse_and_exit(error)
    status = job_exit.FAILED if isinstance(error, LinkLost) else job_exit.BAD_INPUT
    assert done == ([True, status] if finished else [status])


def test_a_launcher_that_is_gone_is_noticed_at_its_store(monkeypatch, capsys) -> None:
    """torchrun was killed before the rank's first line: the thread that watches cannot know."""
    ended: list[int] = []
    monkeypatch.setattr(job_exit, "end_now", ended.append)
    monkeypatch.setattr(job_exit, "PATIENCE_AT_START_SECONDS", 0.5)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # where nobody listens
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    job_exit.require_launcher()
    assert not ended
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    job_exit.require_launcher()
    assert ended == [job_exit.FAILED]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "megatron_epp" in line]
    assert line.startswith("megatron_epp: rank 1 ends: torchrun is gone (its store on 127.0.0.1")


@pytest.mark.parametrize("program", [pretrain_gpt, pretrain_hybrid])
def test_the_launcher_is_watched_before_anything_slow_is_imported(monkeypatch, program) -> None:
    order: list[str] = []
    monkeypatch.setattr(launcher, "end_with_launcher", lambda: order.append("watches"))
    monkeypatch.setattr(entry, "main", lambda *_, **__: order.append("trains"))
    program.run()
    assert order == ["watches", "trains"]
    code = "import sys, megatron_epp.mcore.trainer.launcher; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


LAUNCHER = """
import os, subprocess, sys
rank = [sys.executable, "-c", '''
import sys, time
from megatron_epp.mcore.trainer.launcher import end_with_launcher
end_with_launcher()
print("watches", flush=True)
time.sleep(3600)  # imports
''']
own = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3"}
started = subprocess.Popen(rank, env={**os.environ, **own}, start_new_session=True,
                           stdout=subprocess.PIPE)
started.stdout.readline()
"""


def test_a_rank_ends_whose_launcher_dies_while_it_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
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
    done = subprocess.run(
        [sys.executable, "-c", SIGTERM], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 143 and "rank 0 terminated: pipeline rank 0" in done.stderr
    assert not runs(int(done.stdout))
