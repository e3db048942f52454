"""Signals to launcher, ranks and planner in every order: no checkpoint that is named is cut short.

Twenty jobs that save every second iteration; each gets one to three signals, drawn by its number,
when it has begun, computes or saves. Then nothing of it is left, the checkpoint that the tracker
names can be resumed, and the losses are those of a job that nothing happened to.
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.attack.jobs import Job, Logged, flags, require_same
from tests.attack.training import TOKENS
from tests.mcore.runs import write_corpus

COMBINATIONS, ITERATIONS = 20, 60
EXIT = signal.SIGUSR2  # --exit-signal
SIGNALS = (EXIT, EXIT, EXIT, signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
TARGETS = ("launcher", "rank 0", "rank 1", "planner")
SECONDS = 600.0  # a last resort


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("signals") / "documents", TOKENS)


@pytest.fixture(scope="module")
def undisturbed(corpus: Path) -> dict[int, Logged]:
    with Job(corpus.parent, flags(corpus, train_iters=ITERATIONS)) as job:
        return job.require_trained(ITERATIONS, SECONDS)


def process_of(job: Job, target: str) -> int | None:
    """The process that is called so, if it is there."""
    if target == "launcher":
        return job.processes[0].pid
    if target == "planner":
        planners = [pid for pid, words in job.members().items() if "planner.process" in words]
        return planners[0] if planners else None
    with contextlib.suppress(AssertionError):
        return job.rank(int(target[-1]))
    return None


def gone(job: Job) -> bool:
    """Nothing is left but what Megatron's writers leave of a rank that a signal killed outright."""
    job.processes[0].poll()  # buries it
    left = [words for words in job.members().values() if "from multiprocessing." not in words]
    return not left


@pytest.mark.parametrize("number", range(COMBINATIONS))
def test_signals_at_random(
    number: int, corpus: Path, undisturbed: dict[int, Logged], tmp_path: Path
) -> None:
    drawn = random.Random(number)
    save = tmp_path / "save"
    kept = {"save": save, "load": save, "save_interval": 2}
    if handled := drawn.random() < 0.75:
        kept |= {"exit_signal_handler": True, "exit_signal": EXIT.name}
    at, while_saving = drawn.randrange(1, 9), drawn.random() < 0.5
    targets = drawn.sample(TARGETS, drawn.randrange(1, 5))
    struck = [(target, drawn.choice(SIGNALS), drawn.random() * 0.5) for target in targets]
    what = f"{struck} at {at}, {'saving' if while_saving else 'computing'}, handler {handled}"
    with Job(tmp_path, flags(corpus, train_iters=ITERATIONS, **kept), launcher=True) as job:
        job.wait_for_iteration(at, SECONDS)
        if while_saving:
            saves = job.said.count("saving checkpoint at")
            job.wait_for(lambda: job.said.count("saving checkpoint at") > saves, "save", SECONDS)
        for target, sent, pause in struck:
            process = process_of(job, target)
            with contextlib.suppress(ProcessLookupError):
                if process is not None:
                    os.kill(process, sent)
            time.sleep(pause)
        end = time.monotonic() + SECONDS
        while not gone(job):
            assert time.monotonic() < end, f"{what}: left {job.members()}: {job.last_words(900)}"
            time.sleep(0.2)
        require_same(job.logged(), undisturbed)
    tracker = save / "latest_checkpointed_iteration.txt"
    last = int(tracker.read_text()) if tracker.exists() else 0
    assert last or not while_saving or at < 2 or handled, f"{what}: nothing was saved"
    stop = min(ITERATIONS, last + 3)
    if last >= ITERATIONS:
        return  # the signals ended nothing
    words = flags(corpus, train_iters=ITERATIONS, exit_interval=stop, **kept)
    with Job(tmp_path, words) as job:
        resumed = job.require_trained(stop, SECONDS)
        assert min(resumed) == last + 1, f"{what}: resumed at {min(resumed)}, named is {last}"
        require_same(resumed, undisturbed)
