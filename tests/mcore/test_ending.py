"""Refused jobs end together: status 2 on every rank that is refused, one line from one of them."""

import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from megatron_epp.mcore.job import job_exit
from tests.mcore.runs import (
    PROGRAM,
    ROOT,
    Run,
    command,
    environment,
    flags,
    train,
    trained,
    write_corpus,
)
from tests.waiting import until

pytestmark = pytest.mark.everything

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
if {late}[rank]:
    until(Path(__file__).with_name("refused").exists)
Path(__file__).with_name("refused").touch()
if rank in {refused}:
    started = subprocess.Popen(["sleep", "3601"])
    print("rank", rank, "started", started.pid, flush=True)
    job_exit.refuse_and_exit({error}("rank %d was given a bad plan" % rank))
time.sleep(3600)
"""


def start(tmp_path: Path, program: str, afresh: bool = False) -> Run:
    """Run ``program`` on two ranks; ``afresh``: under torchrun itself."""
    file = tmp_path / "program.py"
    file.write_text(program)
    done = train([], processes=2, program=(str(file),), afresh=afresh)
    assert done.status != 0
    return done


def runs(pid: int) -> bool:
    """Whether a process is there and not merely unburied."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
def test_a_rank_reports_its_error_if_the_store_is_stopped(monkeypatch, lost):
    with psutil.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            store = torch.distributed.TCPStore("localhost", port)
            server.suspend()
            until(lambda: server.status() == psutil.STATUS_STOPPED)
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
            monkeypatch.setattr(job_exit, "_meeting_place", lambda: store)
            monkeypatch.setattr(job_exit, "PATIENCE_AT_START_SECONDS", 0.1)
            monkeypatch.setattr(job_exit, "ANSWER_SECONDS", 0.1)
            assert job_exit._may_report(lost) == (True, True)
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("group", "afresh"),
    # Slow: torchrun itself ends jobs in the two tests of signals below.
    [(False, False), (True, False), pytest.param(False, True, marks=pytest.mark.slow)],
)
def test_refused_ranks_all_leave_with_status_2_and_rank_0_speaks(tmp_path, group, afresh):
    program = REFUSE.format(group=group, late=(1, 0), refused=(0, 1), error="ValueError")
    done = start(tmp_path, program, afresh)
    assert done.errors == ["megatron_epp: error: rank 0 was given a bad plan"]
    started = re.findall(r"rank \d started (\d+)", done.output)
    assert len(started) == 2
    assert not [pid for pid in map(int, started) if runs(pid)]
    assert done.statuses == (2, 2)


@pytest.mark.parametrize(("error", "status"), [("ValueError", 2), ("LinkLost", 1)])
def test_a_rank_that_is_refused_alone_speaks_for_itself(tmp_path, error, status):
    refused = REFUSE.format(group=True, late=(0, 0), refused=(1,), error=error)
    done = start(tmp_path, refused)
    (line,) = done.errors
    assert line.startswith("megatron_epp: error: rank 1 was given a bad plan (rank 1 on ")
    assert status in done.statuses


def test_ranks_and_planner_end_when_their_launcher_is_killed(tmp_path):
    """Also those behind a wrapper, whose parent lives on."""
    corpus = write_corpus(tmp_path / "corpus", [60, 50, 40, 30, 20, 128] * 20)
    wrapper = tmp_path / "run.sh"
    wrapper.write_text(f'#!/bin/bash\n"{sys.executable}" "$@"\necho $? >> {tmp_path}/status\n')
    wrapper.chmod(0o755)
    words = command(flags(corpus, epp=True, epp_plan_ahead=True, train_iters=100000), 2, PROGRAM)
    at = words.index(PROGRAM[1]) - 1
    words[at:at] = ["--no-python", str(wrapper)]
    log = tmp_path / "log"
    with log.open("w") as said:
        launcher = psutil.Popen(words, cwd=ROOT, env=environment(2), stdout=said, stderr=said)
    try:
        until(lambda: "iteration        2/" in log.read_text(), log.read_text)
        started = launcher.children(recursive=True)
        assert sum("megatron_epp.planner.process" in process.cmdline() for process in started) == 1
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(runs(process.pid) for process in started))
    # The second one may find the first one's connection closed before it looks itself.
    assert log.read_text().count("ends: torchrun") >= 1
    assert (tmp_path / "status").read_text() == "1\n1\n"


def test_a_signal_to_launcher_and_ranks_leaves_a_whole_checkpoint(tmp_path):
    """As a batch system signals a step: torchrun dies of it, the ranks save first and then end."""
    corpus = write_corpus(tmp_path / "corpus", [60, 50, 40, 30, 20, 128] * 20)
    save = tmp_path / "save"
    kept = {"epp": True, "train_iters": 1000, "save": save, "save_interval": 1000}
    handled = {"exit_signal_handler": True, "exit_signal": "SIGUSR2"}
    log = tmp_path / "log"
    with log.open("w") as said:
        words = command(flags(corpus, **kept, **handled), 2, PROGRAM)
        launcher = psutil.Popen(words, cwd=ROOT, env=environment(2), stdout=said, stderr=said)
    try:
        until(lambda: "iteration        2/" in log.read_text(), log.read_text)
        ranks = launcher.children()
        assert len(ranks) == 2
        for process in (launcher, *ranks):
            process.send_signal(signal.SIGUSR2)
        assert launcher.wait() == -signal.SIGUSR2
        until(lambda: not any(runs(process.pid) for process in ranks), log.read_text)
    finally:
        with suppress(psutil.NoSuchProcess):
            launcher.kill()
    last = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert f"saved checkpoint from iteration {last:7d}" in log.read_text()
    resumed = trained(flags(corpus, **kept, load=save, exit_interval=last + 1))
    assert f"iteration {last + 1:8d}/" in resumed.output
