#!/usr/bin/env python3
"""Plans and time of a pipeline in which one of two ranks is slower, on this host's CPU.

    scripts/bench/cpu_slow_rank.py [--instructions sse] [--rank 1] [--cases 2048x4] [-o RESULT.md]

The libraries of rank --rank use only SSE 4.2 or AVX2 instructions instead of AVX-512. This imitates
a slower device; the script also times a matrix product and attention alone to show the factor.
`profile` measures both ranks at once. The same run is timed in three ways: with a cost model in
which both ranks are as fast as the fastest, with the measured cost model, and with that model and
layers balanced by time. The ways run --rounds times in changing order. The table has medians over
iterations; the ratio is the first way's seconds divided by those of the row, for the same batch, as
measured and as the executed plans predict.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cpu_pipeline import flags
from cpu_placements import add_flags, in_rounds, measured_costs
from cpu_vocab import WARM_UP
from in_turns import corpus_of

ALIKE = "taken for alike"
# Instructions that MKL, oneDNN and torch may use.
INSTRUCTIONS = {"sse": ("SSE4_2", "SSE41", "default"), "avx2": ("AVX2", "AVX2", "avx2")}
VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
SLOWED = """
import os
if os.environ.get("RANK") == {rank!r}:
    os.environ.update({variables!r})
"""
ALONE = """
import time, torch
torch.set_num_threads(1)
x, w, q = torch.randn(1024, 512), torch.randn(512, 1376), torch.randn(1, 8, 1024, 64)
def seconds(work):
    times = []
    for _ in range(9):
        began = time.thread_time()
        for _ in range(8): work()
        times.append(time.thread_time() - began)
    return sorted(times)[4]
attend = torch.nn.functional.scaled_dot_product_attention
print(seconds(lambda: x @ w), seconds(lambda: attend(q, q, q, is_causal=True)))
"""


def slow_down(rank: int, variables: dict[str, str], folder: Path) -> None:
    """Slow down all Python processes of ``rank`` that start after this call."""
    folder.mkdir()
    text = SLOWED.format(rank=str(rank), variables=variables)
    (folder / "sitecustomize.py").write_text(text)
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *before])


def alone(variables: dict[str, str]) -> str:
    """Return a line on how much longer a product and attention take with ``variables``."""
    both = []
    for more in ({}, variables):
        words = [sys.executable, "-c", ALONE]
        text = subprocess.run(
            words, env={**os.environ, **more}, capture_output=True, text=True, check=True
        ).stdout
        both.append([float(word) for word in text.split()])
    product, attention = (slow / fast for fast, slow in zip(*both, strict=True))
    return f"- alone a product takes {product:.2f}, attention {attention:.2f} times as long there"


def ways_of(file: Path) -> tuple[dict[str, list[str]], str]:
    """Return the flags of every way, and a line on the ranks in the cost model ``file``."""
    text = json.loads(file.read_text())
    factors = text["rank_slowness"]
    alike = file.with_name("alike.json")
    alike.write_text(json.dumps({**text, "rank_slowness": []}))
    model = ["--epp-cost-model", str(file)]
    ways = {
        ALIKE: ["--epp-cost-model", str(alike)],
        "as measured": model,
        "as measured, layers by time": [*model, "--epp-partition", "auto"],
    }
    said = ", ".join(f"{factor:.2f}" for factor in factors)
    measured = f"ranks take {said} times as long as the fastest" if factors else "ranks are alike"
    return ways, f"- `profile`: {measured}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="sse")
    parser.add_argument("--rank", type=int, default=1, choices=(0, 1))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cpu_slow_rank-"))
    corpus = corpus_of(arguments, folder)
    variables = dict(zip(VARIABLES, INSTRUCTIONS[arguments.instructions], strict=True))
    said = [alone(variables)]
    slow_down(arguments.rank, variables, folder / "slowed")

    def ways_of_case(case: str, place: Path) -> tuple[list[str], dict[str, list[str]]]:
        context, batch = map(int, case.split("x"))
        words = flags(corpus, context, batch, WARM_UP + arguments.batches, "fp32")
        ways, measured = ways_of(Path(measured_costs(words, place)[-1]))
        said.append(measured)
        return words, ways

    slower = f"rank {arguments.rank} with {arguments.instructions} alone"
    settings = f"two processes of one thread, {slower}"
    in_rounds(arguments, ways_of_case, ALIKE, folder, said, settings)


if __name__ == "__main__":
    main()
