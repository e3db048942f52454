"""Where nothing moves, every rank says what it waits for, and the job ends when its time is up."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_epp.ir import Kind, Message, Op, Payload, Transfer
from megatron_epp.runtime import executor, watcher
from megatron_epp.runtime.executor import CurrentOp, LinkLost, OutsidePhase
from megatron_epp.runtime.watcher import LOST_STATUS, Watcher
from tests.runtime.pipeline import on_host
from tests.runtime.test_executor import TWO, execute
from tests.runtime.world import run
from tests.waiting import LAST_RESORT_SECONDS

MESSAGE = Message(Payload.GRADIENT, 7, 1, 0)


class Spoken:
    """A watcher of a rank that has done ``what`` since ``seconds``, and what it said and did.

    ``now``: its clock, which only :meth:`after` moves.
    """

    def __init__(self, monkeypatch, what, seconds: float = 0.0, links=None, together=()):
        self.lines: list[str] = []
        self.statuses: list[int] = []
        self.now = 1000.0
        for module in (executor, watcher):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        since = self.now - seconds
        self.current_op = CurrentOp(0, 5, what, since, links, stage=0)
        self.watcher = Watcher(
            self.current_op,
            (4, 6),
            4,
            timedelta(seconds=600),
            tell=self.lines.append,
            end=self.statuses.append,
            together=together,
        )

    def after(self, seconds: float) -> float:
        self.now += seconds
        return self.watcher.look()


@pytest.fixture
def spoken_of(monkeypatch) -> Callable[..., Spoken]:
    return partial(Spoken, monkeypatch)


@pytest.mark.parametrize(
    ("missing", "says"),
    [((1, 3), "; ranks 1 3 are not there yet"), ((2,), "; rank 2 is not there yet"), ((), " s")],
)
def test_a_phase_names_the_ranks_that_it_waits_for(spoken_of, missing, says) -> None:
    spoken = spoken_of("the same call on all replicas that share experts")
    spoken.watcher.missing = lambda: missing
    spoken.after(31)
    (line,) = spoken.lines
    assert line.endswith(says), line


def test_an_op_in_lockstep_names_those_that_run_it_too(spoken_of) -> None:
    """A rank stands in an exchange of experts: who is missing is one of these."""
    spoken = spoken_of(Op(Kind.FORWARD, 3), 31.0, together=(4, 5))
    spoken.after(0)
    assert spoken.lines[0].endswith(
        " s, which ranks 4 5 run together, their replicas being in lockstep"
    )
    alone = spoken_of(Op(Kind.FORWARD, 3), 31.0)
    alone.after(0)
    assert alone.lines[0].endswith(" s")


def test_lines_come_after_half_a_minute_and_then_twice_as_late(spoken_of) -> None:
    spoken = spoken_of(Transfer(Kind.RECEIVE, MESSAGE))
    assert spoken.watcher.look() == 30
    spoken.after(29)
    assert spoken.lines == []
    spoken.after(1.5)
    assert len(spoken.lines) == 1
    assert spoken.lines[0].startswith(
        "rank 4 does not move: pipeline rank 0, stage 0, iteration 5: waited for RECV:B7<1 for 30.5"
    )
    assert spoken.lines[0].endswith(
        ": stage 1 (rank 6) has not sent what B (or I) of chunk 7 makes"
    )
    assert spoken.after(25) == 4.5
    assert len(spoken.lines) == 1
    spoken.after(5)
    assert len(spoken.lines) == 2
    spoken.after(40)
    assert len(spoken.lines) == 2
    spoken.current_op.enter(Op(Kind.FORWARD, 3))  # something moves
    assert spoken.watcher.look() == 30
    spoken.after(31)
    assert "was in F3 for 31.0 s" in spoken.lines[-1]
    assert len(spoken.lines) == 3
    assert spoken.statuses == []


def test_who_waits_for_others_ends_a_little_after_the_timeout(spoken_of) -> None:
    spoken = spoken_of(Transfer(Kind.SEND, Message(Payload.ACTIVATION, 2, 0, 1)))
    spoken.watcher.look()
    spoken.after(602)
    assert spoken.statuses == []
    spoken.after(4)
    assert spoken.statuses == [LOST_STATUS]
    assert spoken.lines[-1].endswith(
        "stage 1 (rank 6) has not taken what F of chunk 2 makes; given up"
    )
    meeting = spoken_of("the plan that all ranks agree on", 606)
    meeting.watcher.look()
    assert meeting.statuses == [LOST_STATUS]


class Device:
    def __init__(self, arriving):
        self.arriving = arriving

    def oldest_arriving(self):
        if self.arriving is None:
            raise RuntimeError("NCCL communicator was aborted")
        return self.arriving


def test_a_device_that_stands_is_seen_behind_a_host_that_went_on(spoken_of) -> None:
    spoken = spoken_of(Op(Kind.BACKWARD, 9), 700, Device(MESSAGE))
    spoken.watcher.look()
    assert "was in B9 for 700" in spoken.lines[0]
    assert "; its device waits for RECV:B7<1: stage 1 (rank 6) has not sent" in spoken.lines[0]
    assert spoken.statuses == [LOST_STATUS]
    gone = spoken_of(Op(Kind.BACKWARD, 9), 700, Device(None))
    gone.watcher.look()
    assert gone.lines[0].endswith(" s")
    assert gone.statuses == []


def test_what_is_not_ours_has_ten_times_the_patience_and_never_ends(spoken_of) -> None:
    spoken = spoken_of(OutsidePhase("the optimizer"), 290)
    spoken.watcher.look()
    assert spoken.lines == []
    spoken.after(20)
    assert "waited for the optimizer for 310" in spoken.lines[0]
    spoken.after(10000)
    assert len(spoken.lines) == 2
    assert spoken.statuses == []


# ------------------------------------------------------------------ a rank that stands still


def stop_a_peer(rank: int, folder: Path, gloo_seconds: float, watch_seconds: float) -> str:
    """Stage 1 is stopped, not ended, in its first backward; what stage 0 says goes to a file."""
    groups = {
        payload: dist.new_group(timeout=timedelta(seconds=gloo_seconds)) for payload in Payload
    }
    peer = folder / "pid"
    if rank == 1:
        peer.write_text(str(os.getpid()))
    dist.barrier()  # both are there: from here on nothing takes long but what stands still

    def stand_still(op: Op) -> None:
        if rank == 1 and op == Op(Kind.BACKWARD, 0):
            os.kill(os.getpid(), signal.SIGSTOP)

    def end_both(status: int) -> None:
        os.kill(int(peer.read_text()), signal.SIGKILL)
        os._exit(status)

    def tell(line: str) -> None:
        with (folder / f"said-{rank}").open("a") as file:
            file.write(f"{line}\n")

    current_op = CurrentOp(rank)
    Watcher(
        current_op, (0, 1), rank, timedelta(seconds=watch_seconds), 0.5, 0.25, tell, end_both
    ).start()
    compute = on_host(TWO, rank, stand_still)
    try:
        execute(TWO, rank, groups, compute, 9, current_op)
    except LinkLost as error:
        os.kill(int(peer.read_text()), signal.SIGKILL)
        return str(error)
    return "nothing happened"


LINE = "rank 0 does not move: pipeline rank 0, stage 0, iteration 9: waited for RECV:B0<1 for "
WHY = " s: stage 1 (rank 1) has not sent what B (or I) of chunk 0 makes"


def test_a_stopped_rank_is_named_and_the_groups_timeout_ends_the_wait(tmp_path) -> None:
    survivor, stopped = run(2, stop_a_peer, tmp_path, tmp_path, 3.0, LAST_RESORT_SECONDS)
    assert stopped == -signal.SIGKILL
    assert survivor.startswith("pipeline rank 0, stage 0, iteration 9: waited for RECV:B0<1 for ")
    assert "; the link is lost: " in survivor
    said = (tmp_path / "said-0").read_text().splitlines()
    assert said  # after half a second and more: when, the tests above say
    assert all(line.startswith(LINE) and line.endswith(WHY) for line in said)


def test_where_waits_never_fail_the_watcher_ends_the_rank(tmp_path) -> None:
    """As NCCL's waits, which return at once."""
    survivor, stopped = run(2, stop_a_peer, tmp_path, tmp_path, LAST_RESORT_SECONDS, 1.5)
    assert survivor == LOST_STATUS
    assert stopped == -signal.SIGKILL
    *_, last = (tmp_path / "said-0").read_text().splitlines()
    assert last.startswith(LINE) and last.endswith(f"{WHY}; given up")
