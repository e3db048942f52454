"""Time for which training waits for plans: real planner processes, and a trainer that sleeps.

    python scripts/bench/planning_ahead.py --list
    python scripts/bench/planning_ahead.py --rows 1,4 [--iterations 40] [--effort 4] [-o RESULT.md]

The script plans one replica of the job with the same processes that training would start for it.
Each iteration sleeps for the seconds that its plan predicts. A host has 8 GPUs and 8 cores for
planning, which its replicas share. If a replica needs more processes at once than this computer has
cores, an iteration lasts longer by this factor, because each process gets a smaller share of a
core; the script prints the factor. Every replica of a host plans as much as the one here, so a
host's CPU seconds are those of this replica times the number of its replicas. Use an idle computer:
other programs delay plans. CPU seconds are less affected.
"""

import argparse
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass

import psutil
from headline import ROOT, host, markdown, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.control.planner_pool import MARGIN, PlannerPool
from megatron_epp.control.planner_process import PlannerProcess
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import StepPart
from megatron_epp.planner.options import Options, default_levers

GPUS, CORES = 8, 8  # of a host; cores for planning
SETTLED = 8  # iterations after which the number of processes has settled


@dataclass(frozen=True)
class Row:
    """Job of the table; ``thousands`` is its context in thousands of tokens."""

    model: str
    device: str
    pp: int
    tp: int
    cp: int
    dp: int
    documents: int
    thousands: int
    corpus: str

    @property
    def planned_here(self) -> int:
        """Number of replicas that the busiest host plans."""
        hosts = max(1, self.pp * self.tp * self.cp * self.dp // GPUS)
        return math.ceil(self.dp / hosts)

    def __str__(self) -> str:
        degrees = f"pp{self.pp} tp{self.tp} cp{self.cp} dp{self.dp}"
        lengths = f"{self.documents} {self.corpus} {self.thousands}K"
        return f"{self.model} {degrees}, {lengths}"


ROWS = (
    Row("llama3-8b", "h100-80g", 2, 2, 1, 8, 512, 32, "wlb"),
    Row("llama3-8b", "h100-80g", 2, 2, 1, 16, 512, 32, "wlb"),
    Row("llama3-8b", "h100-80g", 2, 2, 1, 32, 512, 32, "wlb"),
    Row("llama3-8b", "h100-80g", 2, 2, 1, 32, 2048, 32, "wlb"),
    Row("llama3-70b", "h100-80g", 8, 8, 1, 8, 512, 32, "prolong"),
    Row("llama3-70b", "h100-80g", 4, 8, 2, 8, 512, 128, "wlb"),
    Row("llama3-8b", "h100-80g", 4, 2, 1, 8, 256, 32, "prolong"),
    Row("llama3-8b", "h200-141g", 4, 1, 4, 4, 512, 64, "wlb"),
    Row("llama3-8b", "h200-141g", 4, 1, 4, 16, 2048, 64, "wlb"),
    Row("llama3-8b", "h200-141g", 4, 1, 4, 64, 2048, 64, "wlb"),
    Row("llama3-8b", "h200-141g", 4, 1, 4, 64, 8192, 64, "wlb"),
    Row("llama3-8b", "h200-141g", 8, 1, 4, 16, 8192, 64, "wlb"),
    Row("llama3-70b", "h200-141g", 32, 1, 4, 4, 8192, 64, "wlb"),
    # As many documents for each replica.
    *(
        Row("llama3-8b", "h200-141g", 4, 1, 4, dp, 32 * dp, 64, "wlb")
        for dp in (1, 2, 4, 8, 16, 32, 64)
    ),
)


def trained(row: Row, effort: int, iterations: int) -> list[str]:
    """Simulate training of the job of ``row``, and return its table cells."""
    context = row.thousands * 1024
    cost = named_cost(
        row.model, row.device, pp=row.pp, tp=row.tp, cp=row.cp, dp=row.dp, zero=1, **AS_TRAINED
    )
    options = Options(context=context, levers=default_levers(row.device), effort=effort)
    corpus = open_corpus(row.corpus, context)
    most = max(1, CORES // row.planned_here)
    pool = PlannerPool(lambda: PlannerProcess(cost, options, "epp", row.dp, 0), most)
    slower, waits, took, scale, started = 0.0, [], [], 1.0, 0.0
    for iteration in range(1, iterations + 1):
        began = time.perf_counter()
        text = pool.reply(iteration, corpus.batch(iteration, row.documents), False).step
        waits.append(time.perf_counter() - began)
        predicted = StepPart.parse(text).plans[0].predicted
        assert predicted is not None
        if iteration == 2:  # the first also starts the process
            needed = min(most, math.ceil(MARGIN * pool.slowest / predicted.seconds))
            scale = max(1.0, needed / len(os.sched_getaffinity(0)))
        if iteration == SETTLED:
            started = cpu_seconds(pool)
        took.append(predicted.seconds)
        for later in range(1, pool.ahead + 1):
            pool.ask(iteration + later, corpus.batch(iteration + later, row.documents))
        slower += scale * predicted.seconds
        time.sleep(scale * predicted.seconds)
    plans = iterations - SETTLED
    cpu = (cpu_seconds(pool) - started) / plans
    memory = [psutil.Process(one.pid).memory_info().rss / 2**20 for one in pool.processes]
    pool.close()
    settled, lasted = sum(waits[SETTLED:]), scale * sum(took[SETTLED:])
    return [
        str(row),
        f"{statistics.mean(took):.2f}",
        f"{cpu:.2f}",
        f"{row.planned_here}",
        f"{cpu * row.planned_here:.2f}",
        f"{len(memory)} of {most}",
        f"{sum(memory) * row.planned_here:.0f}",
        f"{scale:.1f}",
        f"{waits[0]:.1f}",
        f"{settled / (settled + lasted):.1%}",
    ]


def cpu_seconds(pool: PlannerPool) -> float:
    """Return the CPU seconds of all planner processes so far."""
    times = (psutil.Process(one.pid).cpu_times() for one in pool.processes)
    return sum(each.user + each.system for each in times)


HEADERS = (
    *("job", "iteration s", "CPU s a plan", "replicas planned a host", "CPU s a host"),
    *("processes", "MiB a host", "slowed", "first wait s", "waited"),
)


def main() -> None:
    """Print a line for every requested row."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the rows with their numbers")
    parser.add_argument("--rows", help="their numbers, joined by commas; default: all")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--effort", type=int, default=Options().effort)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{number:2} {row}" for number, row in enumerate(ROWS)))
        return
    if arguments.iterations <= SETTLED:
        parser.error(f"--iterations {arguments.iterations}: expected more than {SETTLED}")
    numbers = range(len(ROWS)) if arguments.rows is None else arguments.rows.split(",")
    lines = []
    for number in map(int, numbers):
        lines.append(trained(ROWS[number], arguments.effort, arguments.iterations))
        print(lines[-1], file=sys.stderr, flush=True)
    load = f"{host()}; load average {os.getloadavg()[0]:.1f} at the end"
    publish(f"{markdown(HEADERS, lines)}\n{load}\n", arguments.output)


if __name__ == "__main__":
    main()
