"""Strikes at named moments: how ranks end, and that the next start continues bit for bit.

A few cells of scripts/failures.py, without torchrun.
"""

import os
import signal
import subprocess
import sys

import pytest
import torch

from megatron_epp.mcore.job import job_exit
from megatron_epp.runtime.executor import LinkLost
from tests.attack import strikes
from tests.attack.nodes import losses, printed_losses
from tests.attack.strikes import Strike
from tests.mcore.runs import ROOT, flags, train, trained

pytestmark = pytest.mark.everything

PROGRAM = (str(ROOT / "tests" / "attack" / "struck_training.py"),)


@pytest.fixture(scope="module")
def job(corpus) -> tuple[list[str], dict[int, float]]:
    """Flags, and the losses of a job that nothing happens to."""
    how = {"epp": True, "global_batch_size": 4, "train_iters": 4, "clip_grad": 0}
    how |= {"split": "80,20,0", "eval_iters": 1, "eval_interval": 2, "lr_decay_style": "constant"}
    words = flags(corpus, **how)
    return words, losses(trained(words, 2, PROGRAM).output)


@pytest.mark.parametrize(
    ("strike", "statuses"),
    [
        (Strike("kill", "first", "save", 4), {-signal.SIGKILL}),
        # gloo aborts where its listening socket is closed before anybody waits for a message.
        (Strike("close", "rank", "evaluation", 4), {-signal.SIGABRT, 1}),
    ],
    ids=str,
)
def test_a_struck_job_ends_and_continues(job, tmp_path, monkeypatch, strike, statuses) -> None:
    words, straight = job
    words = [*words, "--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "2"]
    for name, text in strikes.environment([strike], tmp_path).items():
        monkeypatch.setenv(name, text)
    struck = train(words, 2, PROGRAM)
    assert f"strike 0: {strike}" in struck.output and statuses & {*struck.statuses}, struck.output
    # The other rank says so, or where it was when torchrun ended it.
    assert 0 not in struck.statuses and "megatron_epp: " in struck.output
    assert "Traceback" not in struck.output
    resumed = trained(words, 2, PROGRAM)
    assert "strike" not in resumed.output
    assert sorted(losses(resumed.output)) == [3, 4]  # of 4, nothing is loaded
    for iteration, loss in printed_losses(struck.output) + printed_losses(resumed.output):
        assert loss == straight[iteration]


def test_which_exceptions_are_lost_ranks(monkeypatch) -> None:
    closed = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    kinds = RuntimeError(closed), torch.distributed.DistNetworkError("Broken pipe")
    for started in (True, False):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda started=started: started)
        for error in (*kinds, RuntimeError("shapes differ"), LinkLost(closed)):
            try:
                raise error
            except RuntimeError as raised:
                lost = job_exit.lost_rank(raised)
            assert (lost is not None) == (started and error in kinds)
            assert lost is None or f"another rank is lost: {error}" in str(lost)


def test_strikes_are_taken_in_their_order(tmp_path, monkeypatch) -> None:
    listed = [Strike("kill", "rank", "iteration", 4), Strike("stop", "agent", "restart")]
    environ = strikes.environment(listed, tmp_path) | {"RANK": "1", "WORLD_SIZE": "2"}
    assert [Strike.read(str(strike)) for strike in listed] == listed
    (tmp_path / "rank-0").write_text("10 11")
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(strikes, "_send", lambda *both: sent.append(both))
    for moment, iteration in (("restart", 0), ("iteration", 3), ("save", 4)):
        strikes.strike_if_due(moment, iteration, environ)
    strikes.strike_if_due("iteration", 4, {**environ, "RANK": "0"})
    assert not sent
    for moment, iteration in (("iteration", 4), ("iteration", 4), ("restart", 0), ("restart", 0)):
        strikes.strike_if_due(moment, iteration, environ)
    assert sent == [(os.getpid(), signal.SIGKILL), (os.getppid(), signal.SIGSTOP)]


CUT_OFF = """
import socket
from tests.attack import strikes
server = socket.create_server(("127.0.0.1", 0))
peer, own = socket.create_connection(server.getsockname()), server.accept()[0]
pair = socket.socketpair()
strikes.listen()
NUMBER = getattr(strikes, HOW)
CUT_OFF
own.settimeout(0.2)
try:
    peer.sendall(b"x")
    print("heard", own.recv(1))
except OSError as error:
    print(type(error).__name__)
pair[0].sendall(b"y")
print(pair[1].recv(1))
"""


@pytest.mark.parametrize(
    ("how", "seen"), [("CLOSE", "BrokenPipeError"), ("SILENCE", "TimeoutError"), ("HOW", "heard")]
)
def test_a_process_that_is_cut_off(how: str, seen: str) -> None:
    """Connections to the network end, or what is sent over them never arrives; no others."""
    cut_off = "" if how == "HOW" else "strikes.cut_off(NUMBER)"
    program = CUT_OFF.replace("CUT_OFF", cut_off).replace("HOW", repr(how))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [seen + " b'x'" * (how == "HOW"), "b'y'"]
