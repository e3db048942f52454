"""Strikes at named moments: how ranks end, and that the next start continues bit for bit.

A few cells of scripts/failures.py, without torchrun.
"""

import signal

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
