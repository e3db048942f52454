"""Heading of a result file, common to all benchmarks: date, commit, command, hardware."""

import datetime
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = shlex.join(  # as it was typed: those that run Megatron give it other words
    [f"scripts/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
)


def heading(hardware: str) -> str:
    """Return the heading in Markdown; ``hardware`` describes the measured or computing machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"## {datetime.date.today()}, commit {commit or 'unknown'}\n\n`{_COMMAND}`\n\n"
        f"{hardware}.\n\n"
    )


def host() -> str:
    """Return the name of this host's processor, if it is known."""
    cpuinfo = Path("/proc/cpuinfo")
    named = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if line.startswith("model name")
    ]
    processor = named[0] if named else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{processor}, {cores} cores, Python {platform.python_version()}"


def abreast(processes: int, dtype: str, seconds: float = 1.0, turns: int = 3) -> float:
    """Return the throughput of single-thread ``processes`` at once, relative to one process alone.

    The work is matrix products, timed in turns. The cores of a shared host may be hyperthreads:
    then a stage that waits makes the other stage faster, a bubble costs nothing, and no plan gains
    by filling it.
    """
    context = multiprocessing.get_context("spawn")
    alone, together = [], []
    for _ in range(turns):
        for workers, results in ((1, alone), (processes, together)):
            start, rates = context.Barrier(workers), context.SimpleQueue()
            jobs = [
                context.Process(target=_multiply, args=(dtype, seconds, start, rates))
                for _ in range(workers)
            ]
            for job in jobs:
                job.start()
            results.append(sum(rates.get() for _ in jobs))
            for job in jobs:
                job.join()
    return statistics.median(together) / statistics.median(alone)


def _multiply(dtype: str, seconds: float, start, rates) -> None:
    """Measure matrix products per second, after all processes have reached ``start``."""
    import torch

    torch.set_num_threads(1)
    rows = torch.ones(512, 512, dtype=getattr(torch, dtype))
    weight = torch.ones(512, 2048, dtype=rows.dtype)
    start.wait()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        rows @ weight
        done += 1
    rates.put(done / (time.perf_counter() - began))


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown, with numbers right-aligned."""
    from megatron_epp.show.table import aligned, numeric

    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    right = [numeric([row[column] for row in rows]) for column in range(len(headers))]
    marks = [
        "-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)
    ]
    lines = [[*map(aligned, cells, widths, right)] for cells in (headers, *rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], marks, *lines[1:]))


def publish(text: str, path: str | None) -> None:
    """Print ``text``; append it to the file ``path``, if given, with a heading for one core."""
    print(text)
    write(path, heading(f"{host()}, one of them used") + text)


def write(path: str | None, text: str) -> None:
    """Append ``text`` to the file ``path``; do nothing if ``path`` is None."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as out:
            out.write(text)
