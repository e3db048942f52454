"""Training runs for tests: a small corpus, a small model, one torchrun, what came out of it."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

ROOT = Path(__file__).parents[2]
VOCABULARY = 127

MODEL = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
"""


def flags(corpus: Path, **changes: object) -> list[str]:
    """Flags of a small run; ``changes`` override or add, None takes a flag away."""
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
    words = MODEL.split()
    for key, value in named.items():
        if value is True:
            words.append(f"--{key}")
        elif value is not None:
            words += [f"--{key}", str(value)]
    return words


def write_corpus(
    prefix: Path, lengths: list[int], seed: int = 0, documents_of: int | None = None
) -> Path:
    """Documents of ``lengths`` tokens drawn at random, or of one token; returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = numpy.random.RandomState(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in lengths:
        tokens = torch.from_numpy(random.randint(0, VOCABULARY, length))
        builder.add_item(tokens if documents_of is None else torch.full_like(tokens, documents_of))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@dataclass(frozen=True)
class Run:
    status: int
    output: str

    @property
    def losses(self) -> list[float]:
        return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", self.output)]

    @property
    def grad_norms(self) -> list[float]:
        return [float(x) for x in re.findall(r"grad norm: ([0-9.]+)", self.output)]

    @property
    def errors(self) -> list[str]:
        return [x for x in self.output.splitlines() if x.startswith("megatron_epp: error:")]


def environment(processes: int) -> dict[str, str]:
    """``processes`` of 1 is a world of its own without torchrun, which takes seconds to start."""
    alone = {}
    if processes == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
        alone = {"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in alone.items()}}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **alone}


def command(words: list[str], processes: int, program: tuple[str, ...]) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        start += [str(processes)]
    return [*start, *program, *words]


def train(
    words: list[str],
    processes: int = 2,
    program: tuple[str, ...] = ("-m", "megatron_epp.pretrain_gpt"),
    seconds: float = 240,
) -> Run:
    """Run the program; ``processes`` of 1 goes without torchrun."""
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
    return Run(done.returncode, done.stdout)
