"""Training runs for tests: a small corpus, a small model, one run, what came out of it."""

import atexit
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.forks import become, with_megatron
from tests.waiting import LAST_RESORT_SECONDS

ROOT = Path(__file__).parents[2]
VOCABULARY = 127
# Some documents are longer than --seq-length.
LENGTHS = [97, 3, 40, 260, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 150, 33, 8, 61, 11]
# torchrun's: how often it looks at its ranks, and how long it waits for those it told to end.
POLL_SECONDS, GRACE_SECONDS = 0.1, 30.0

MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
"""


def flags(corpus: Path, **changes: object) -> list[str]:
    """Flags of a small run; ``changes`` override or add, None takes a flag of MODEL away."""
    named = {
        "seq-length": 128,
        "max-position-embeddings": 128,
        "pipeline-model-parallel-size": 2,
        "global-batch-size": 6,
        "train-iters": 3,
        "lr": "1e-3",
        "eval-iters": 0,
        "data-path": corpus,
        "split": "100,0,0",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY,
        "log-interval": 1,
        # Measured ones differ from run to run, and plans with them.
        "epp-cost-model": "analytic",
        **{key.replace("_", "-"): value for key, value in changes.items()},
    }
    # A process that plans ahead takes longer to start than a small run; tests of it name it.
    if named.get("epp") and "epp-plan-ahead" not in named:
        named["no-epp-plan-ahead"] = True
    if named.get("epp"):  # auto, the default, follows from predicted times
        named.setdefault("epp-placement", "even")
    words = MODEL.split()
    for key, value in named.items():
        if value is True:
            words.append(f"--{key}")
        elif value is not None:
            words += [f"--{key}", str(value)]
        elif f"--{key}" in words:
            at = words.index(f"--{key}")
            del words[at : at + (1 if words[at + 1].startswith("--") else 2)]
    return words


def write_corpus(
    prefix: Path, lengths: list[int], seed: int = 0, documents_of: int | None = None
) -> Path:
    """Documents of ``lengths`` tokens drawn at random, or of one token; returns the prefix."""
    random = numpy.random.RandomState(seed)
    drawn = [random.randint(0, VOCABULARY, length) for length in lengths]
    if documents_of is not None:
        drawn = [numpy.full(length, documents_of) for length in lengths]
    return write_documents(prefix, drawn, dtype=numpy.uint16)


def write_documents(
    prefix: Path, documents: Sequence[Any], sentences: int = 1, dtype: type = numpy.int32
) -> Path:
    """A .bin/.idx of ``documents``, each in ``sentences`` sequences; returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        for part in numpy.array_split(numpy.array(document, dtype=dtype), sentences):
            builder.add_item(torch.from_numpy(part))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@dataclass(frozen=True)
class Run:
    """status: of the launcher, 1 where a rank failed; statuses: of the ranks."""

    status: int
    output: str
    statuses: tuple[int, ...]

    @property
    def losses(self) -> list[float]:
        return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", self.output)]

    @property
    def grad_norms(self) -> list[float]:
        return [float(x) for x in re.findall(r"grad norm: ([0-9.]+)", self.output)]

    @property
    def errors(self) -> list[str]:
        return [x for x in self.output.splitlines() if x.startswith("megatron_epp: error:")]


PROGRAM = ("-m", "megatron_epp.pretrain_gpt")
DOUBLE = (str(Path(__file__).with_name("double_losses.py")),)


def exact_losses(run: Run) -> list[float]:
    """Losses of the iterations of a run of DOUBLE, in full."""
    found = dict(re.findall(r"exact: iteration (\d+) (\S+) lm loss", run.output))
    return [float(loss) for loss in found.values()]


def train(
    words: list[str],
    processes: int = 2,
    program: tuple[str, ...] = PROGRAM,
    seconds: float = LAST_RESORT_SECONDS,
    afresh: bool = False,
) -> Run:
    """Run the program on ``processes`` ranks; 0: by itself, as without torchrun.

    Ranks are forked from a process that has Megatron imported (tests/forks.py), in the environment
    that torchrun would give them: the program itself runs from its first line, as ``__main__``.
    ``afresh``, or where there is a GPU: new processes, started by torchrun itself where they are
    several.
    """
    if afresh or torch.cuda.is_available():
        return _started(words, processes, program, seconds)
    return _forked(words, processes, program, seconds)


def trained(words: list[str], *others: Any, **how: Any) -> Run:
    """A run that ends well."""
    run = train(words, *others, **how)
    assert run.status == 0, run.output
    return run


# ------------------------------------------------------------------ new processes


def environment(processes: int) -> dict[str, str]:
    """``processes`` of 1 is a world of its own without torchrun, which takes seconds to start."""
    alone: dict[str, Any] = {}
    if processes == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
        alone = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in alone.items()}}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **alone}


def command(words: list[str], processes: int, program: tuple[str, ...]) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        start += [str(processes)]
    return [*start, *program, *words]


def _started(words: list[str], processes: int, program: tuple[str, ...], seconds: float) -> Run:
    done = subprocess.run(
        command(words, processes, program),
        cwd=ROOT,
        env=environment(processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=seconds,
    )
    statuses = re.findall(r"exitcode +: (-?\d+)", done.stdout)  # torchrun names those that failed
    if processes <= 1 or not done.returncode:
        statuses = [done.returncode] * max(1, processes)
    return Run(done.returncode, done.stdout, tuple(map(int, statuses)))


# ------------------------------------------------------------------ forked ones


def _forked(words: list[str], processes: int, program: tuple[str, ...], seconds: float) -> Run:
    """As torchrun does on one host: it keeps the store at which ranks meet, and where one fails the
    others are told to end."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = with_megatron()
    ranks: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        for rank in range(max(1, processes)):
            place = _as_torchrun(rank, processes, store.port) if processes else environment(0)
            given = (place, str(output), program, words)
            ranks.append(context.Process(target=run_program, args=given))
            ranks[-1].start()
        try:
            end = time.monotonic() + seconds
            while any(rank.exitcode is None for rank in ranks) and time.monotonic() < end:
                wait([rank.sentinel for rank in ranks if rank.exitcode is None], 0.5)
                if any(rank.exitcode for rank in ranks):
                    _wait_for_all(ranks, POLL_SECONDS)
                    break
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.join(GRACE_SECONDS)
        finally:
            for rank in ranks:
                _kill_with_all_it_started(rank)
        said = output.read_text(errors="replace")
    if time.monotonic() > end:
        raise TimeoutError(f"no end in {seconds:.0f} s: {' '.join(words)}\n{said}")
    statuses = tuple(rank.exitcode for rank in ranks)
    failed = next((status for status in statuses if status), 0)
    return Run(failed if processes <= 1 else int(failed != 0), said, statuses)


def _wait_for_all(ranks: list[Any], seconds: float) -> None:
    """Until all of them have ended by themselves, or the time is over."""
    end = time.monotonic() + seconds
    while living := [rank.sentinel for rank in ranks if rank.exitcode is None]:
        if not wait(living, max(0.0, end - time.monotonic())):
            break


def _kill_with_all_it_started(rank: Any) -> None:
    """Where it still lives; what outlives a rank that has ended is a test's own question."""
    if rank.exitcode is None:
        with suppress(ProcessLookupError):  # it has not become a session yet
            os.killpg(rank.pid, signal.SIGKILL)
    rank.kill()
    rank.join()


def _as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment in which torchrun starts a rank."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": "forked",
    }
    return {**environment(2), **{key: str(value) for key, value in place.items()}}


def run_program(
    place: dict[str, str], output: str, program: tuple[str, ...], words: list[str]
) -> None:
    """In the forked process."""
    become(place, str(ROOT), output)
    execute(program, words)


def execute(program: tuple[str, ...], words: list[str]) -> None:
    """``program`` with ``words``, as Python's command line would run it."""
    assert "megatron.training" in sys.modules, "the fork server has nothing imported"
    try:
        if program[0] == "-m":
            sys.argv = [program[1], *program[2:], *words]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*program, *words]
            sys.path.insert(0, str(Path(program[0]).parent))
            runpy.run_path(program[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
