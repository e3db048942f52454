"""Jobs of many kinds: epp against stock, with other host times, without each default.

    python scripts/bench/study_jobs.py [--parts stock,host,defaults] [--jobs 8b-a 8b-b ...]
                                       [--batches 1] [-o RESULT.md]
    python scripts/bench/study_jobs.py --parts stock,host --jobs table --batches 2

All numbers are **simulated** with the analytic cost model and with the levers of training on the
device. Parts ``stock`` and ``defaults`` plan every job as ``compare`` does by default, the others
with one stage per rank and `auto` vocabulary parallelism. For a job with several replicas, the
replica with the most work counts. Defaults are chosen on the ``even`` jobs (the second, fourth,
...), and evaluated on the ``odd`` jobs; ``table`` is another set. `sft`, `conv` and `synth` are
log-normal distributions (median 450, 7,000, 11,000 tokens; sigma 1, 1.05, 0.8); other distributions
are those of this project.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from headline import ROOT, markdown, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.layout import named_layout_cost, run_cost
from megatron_epp.cli.machine import AS_TRAINED, with_padding
from megatron_epp.cli.options import parse
from megatron_epp.cli.plan import options_of
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue import devices
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Plan, PlanError
from megatron_epp.ir.placement import EVENLY
from megatron_epp.planner.choose import FIRST_BATCHES
from megatron_epp.planner.choose.choice import heaviest, run_choice
from megatron_epp.planner.choose.slow_hosts import SLOW_HOST, with_hosts
from megatron_epp.planner.options import Options, default_levers
from megatron_epp.planner.registry import planner_of
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.planner.stock import stock_of
from megatron_epp.sim.play import play

K = 1024
DRAWN = {"sft": (450, 1.0), "conv": (7000, 1.05), "synth": (11_000, 0.8)}


@dataclass(frozen=True)
class Job:
    model: str
    pp: int
    tp: int
    cp: int
    dp: int
    context: int  # in thousands
    corpus: str
    documents: int
    device: str = "h100-80g"
    zero: int = 1
    ep: int | None = None

    def cost(self, device: str = "") -> Cost:
        degrees = {name: getattr(self, name) for name in ("pp", "tp", "cp", "dp", "ep", "zero")}
        return named_cost(self.model, device or self.device, **degrees, **AS_TRAINED)

    def batch(self, number: int) -> tuple[int, ...]:
        if self.corpus not in DRAWN:
            return open_corpus(self.corpus, self.context * K).batch(number, self.documents)
        median, sigma = DRAWN[self.corpus]
        random = np.random.RandomState(number)
        drawn = random.lognormal(np.log(median), sigma, self.documents)
        return tuple(np.clip(drawn, 16, self.context * K).astype(int).tolist())

    def options(self, **fields: object) -> Options:
        levers = default_levers(self.device)
        return Options(**{"context": self.context * K, "levers": levers, **fields})


A = {"device": "a100-80g"}
JOBS = {
    "8b-a": Job("llama3-8b", 4, 1, 8, 1, 128, "wlb", 512),
    "8b-b": Job("llama3-8b", 2, 4, 2, 2, 32, "sft", 256),
    "8b-c": Job("llama3-8b", 4, 2, 1, 2, 32, "conv", 128, **A),
    "8b-d": Job("llama3-8b", 2, 2, 8, 1, 256, "sft", 256),
    "13b-a": Job("gpt-13b", 4, 1, 8, 1, 96, "wlb", 512, **A, zero=3),
    "13b-b": Job("gpt-13b", 8, 1, 8, 1, 128, "conv", 256, **A, zero=3),
    "13b-c": Job("gpt-13b", 8, 1, 4, 1, 32, "wlb", 64),
    "70b-a": Job("llama3-70b", 4, 8, 2, 1, 128, "wlb", 256),
    "70b-b": Job("llama3-70b", 8, 8, 1, 2, 32, "sft", 512),
    "70b-c": Job("llama3-70b", 16, 8, 2, 1, 256, "sft", 128),
    "70b-d": Job("llama3-70b", 8, 8, 1, 1, 128, "wlb", 128, **A),
    "q30-a": Job("qwen3-30b-a3b", 2, 1, 8, 2, 128, "wlb", 256),
    "q30-b": Job("qwen3-30b-a3b", 4, 8, 1, 1, 32, "sft", 256),
    "q235": Job("qwen3-235b-a22b", 8, 4, 2, 2, 128, "synth", 256),
    "nemo": Job("nemotron-h-8b", 4, 8, 1, 1, 256, "conv", 64),
    "qnext": Job("qwen3-next-80b", 4, 8, 1, 2, 128, "sft", 256),
    "dsv3": Job("deepseek-v3", 16, 1, 8, 4, 32, "wlb", 512),
}
TABLE = {
    "8b-64k-16": Job("llama3-8b", 4, 8, 1, 1, 64, "wlb", 16),
    "8b-32k-64": Job("llama3-8b", 4, 2, 1, 1, 32, "wlb", 64),
    "8b-128k-64": Job("llama3-8b", 2, 1, 8, 1, 128, "wlb", 64),
    "13b-32k-64": Job("gpt-13b", 8, 1, 4, 1, 32, "wlb", 64, **A),
    "70b-64k-128": Job("llama3-70b", 4, 8, 1, 1, 64, "wlb", 128),
    "70b-128k-64": Job("llama3-70b", 8, 8, 1, 1, 128, "wlb", 64),
    "q30-64k-64": Job("qwen3-30b-a3b", 4, 1, 8, 1, 64, "wlb", 64, ep=8),
    "q30-64k-32": Job("qwen3-30b-a3b", 2, 1, 8, 1, 64, "prolong", 32, ep=8),
    "qnext-32k-32": Job("qwen3-next-80b", 4, 8, 1, 1, 32, "wlb", 32, ep=8),
    "8b-32k-8": Job("llama3-8b", 4, 1, 2, 1, 32, "prolong", 8),
}
EVEN, ODD = tuple(JOBS)[1::2], tuple(JOBS)[::2]
WORLDS = (0.5, 1.0, 2.0)  # times the host time that plans assume


def with_host(name: str, factor: float, folder: str) -> str:
    """Write a file for the device with host times times ``factor``; return its path."""
    known = devices.DEVICES[name]
    scaled = {
        field: getattr(known, field) * factor
        for field in ("host_forward_seconds", "host_backward_seconds")
    }
    path = Path(folder) / f"{name}-{factor:g}.json"
    path.write_text(json.dumps(dataclasses.asdict(known) | scaled))
    return str(path)


def planned(
    job: Job,
    cost: Cost,
    batch: Sequence[int],
    planner: str = "epp",
    options: Options | None = None,
) -> PlannedReplica:
    """Return a plan for the job on ``cost``, with the faster choice of vocabulary parallelism."""
    options = options or job.options()
    made = run_choice(
        cost.replace(dp=1), [batch], options, planner, vocabularies=(False, True)
    ).cost
    found = planner_of(planner)(
        batch, cost.with_vocabulary(made.layout.vocabulary_parallel), options
    )
    if not found.fits:
        raise PlanError("does not fit")
    return found


def seconds_on(plan: Plan, cost: Cost) -> float:
    return play(plan, cost.with_vocabulary(plan.vocabulary_parallel).table(plan)).seconds


@dataclass(frozen=True)
class Compared:
    """A job as ``compare`` plans it by default: stock's cost model, and that of epp's choice."""

    cost: Cost
    elastic: Cost
    options: Options
    batches: list[list[int]]  # of the replica with the most work

    @classmethod
    def of(cls, job: Job, batches: int) -> "Compared":
        words = ["compare", "--lengths", job.corpus, "--model", job.model, "--device", job.device]
        words += ["--context", str(job.context * K), "--global-batch-size", str(job.documents)]
        for name in ("pp", "tp", "cp", "dp", "ep", "zero"):
            if (value := getattr(job, name)) is not None:
                words += [f"--{name}", str(value)]
        arguments = parse(words)
        options = options_of(arguments)
        first = SimpleNamespace(first=[job.batch(number) for number in range(FIRST_BATCHES)])
        named = named_layout_cost(arguments, "epp")
        cost = with_padding(named, arguments, first.first, arguments.dp)
        elastic = run_cost(arguments, cost, first, options, "epp")
        held = [heaviest(job.batch(each), cost, options.lockstep) for each in range(batches)]
        return cls(cost, elastic, options, held)

    def rows(self, host: float = 1.0) -> Iterator[list[str]]:
        """Yield, for every batch, cells on stock and epp if hosts take ``host`` times as long."""
        stock = stock_of(self.batches, with_hosts(self.cost, host), self.options)
        elastic = with_hosts(self.elastic, host)
        for number, (lengths, packed) in enumerate(zip(self.batches, stock.batches, strict=True)):
            block = planner_of("epp").plan_block(lengths, elastic, self.options)
            planner_of("epp").require_fit(block, elastic)
            taken = max(each.seconds for each in block.planned)
            cells = [str(number), f"{packed.seconds:.4g}", f"{taken:.4g}"]
            yield [*cells, f"{packed.seconds / taken:.3f}", str(stock)]


def against_stock(jobs: dict[str, Job], batches: int, host: float = 1.0) -> str:
    """Return the seconds of stock, which it is, the seconds of epp by default, and their ratio.

    epp keeps the stages that it chose for the assumed hosts.
    """
    rows = []
    for name, job in jobs.items():
        for cells in Compared.of(job, batches).rows(host):
            rows.append([name, *cells])
            progress(rows[-1])
    ratios = sorted(float(row[4]) for row in rows)
    least, median = ratios[0], statistics.median(ratios)
    table = markdown(["job", "batch", "stock s", "epp s", "stock / epp", "stock"], rows)
    return f"{table}\nstock / epp: least {least:.3f}, median {median:.3f}\n"


def host_times(jobs: dict[str, Job], batches: int) -> str:
    """Return epp against stock on slow hosts, and the loss of epp's plans on other hosts.

    The loss of plans for the assumed host time is relative to the best plan for the real one.
    """
    slow = against_stock(jobs, batches, SLOW_HOST)
    rows = []
    for name, batch, job in each_batch(jobs, batches):
        with tempfile.TemporaryDirectory() as folder:
            costs = [job.cost(with_host(job.device, world, folder)) for world in WORLDS]
        own = [planned(job, cost, batch) for cost in costs]
        assumed = own[WORLDS.index(1.0)]
        cells = [name, str(assumed.chunks)]
        for cost, best in zip(costs, own, strict=True):
            least = min(seconds_on(made.plan, cost) for made in own)
            taken = seconds_on(assumed.plan, cost)
            cells += [f"{taken:.3f}", f"{taken / least - 1:.1%}", str(best.chunks)]
        rows.append(cells)
        progress(cells)
    told = ("s at x {:g}", "loss", "chunks of its own")
    losses = markdown(
        ["job", "chunks", *(each.format(world) for world in WORLDS for each in told)], rows
    )
    return f"Hosts {SLOW_HOST:g} times as slow:\n\n{slow}\n{losses}"


def defaults(jobs: dict[str, Job], batches: int) -> str:
    """Return seconds with all defaults, and the ratio to them if one choice is changed."""
    rows = []
    for name, job in jobs.items():
        compared = Compared.of(job, batches)
        cost, options = compared.elastic, compared.options
        on = cost.layout.vocabulary_parallel
        one_stage = run_choice(
            *(compared.cost, compared.batches, options, "epp"),
            placements=(EVENLY,),
            vocabularies=(False, True),
        ).cost
        for batch in compared.batches:
            base = of(batch, cost, options)
            others = [
                of(batch, one_stage, options),
                of(batch, cost.with_vocabulary(not on), options),
                of(batch, cost, lacking(options, "local")),
                of(batch, cost, lacking(options, "wsplit")),
            ]
            ratios = [f"{other / base:.3f}" for other in others]
            places = str(cost.layout.placement)
            rows.append([name, f"{base:.3f}", places, "on" if on else "off", *ratios])
            progress(rows[-1])
    return markdown(
        [
            "job",
            "default s",
            "ranks of its stages",
            "vocabulary",
            "one stage a rank",
            "vocabulary otherwise",
            "no single-rank documents",
            "no split backward",
        ],
        rows,
    )


def lacking(options: Options, lever: str) -> Options:
    return dataclasses.replace(options, levers=options.levers - {lever})


def of(batch: Sequence[int], cost: Cost, options: Options) -> float:
    """Return the seconds of epp's plan; NaN if there is no plan."""
    try:
        block = planner_of("epp").plan_block(batch, cost, options).planned
    except ValueError:
        return np.nan
    return max(each.seconds for each in block) if all(each.fits for each in block) else np.nan


def each_batch(jobs: dict[str, Job], batches: int) -> Iterator[tuple[str, Sequence[int], Job]]:
    for name, job in jobs.items():
        for number in range(batches):
            yield name, heaviest(job.batch(number), job.cost()), job


def progress(cells: Sequence[str]) -> None:
    print(*cells, file=sys.stderr, flush=True)


PARTS: dict[str, tuple[str, Callable[[dict[str, Job], int], str]]] = {
    "stock": ("epp by default against stock", against_stock),
    "host": ("Plans of the assumed host time where hosts are faster or slower", host_times),
    "defaults": ("Choices made otherwise, over the default's seconds", defaults),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--jobs", nargs="+", default=["even"], help="names, even, odd or table")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    args = parser.parse_args()
    sets = {"even": EVEN, "odd": ODD, "table": tuple(TABLE)}
    jobs = {name: (JOBS | TABLE)[name] for word in args.jobs for name in sets.get(word, (word,))}
    parts = [PARTS[name] for name in args.parts.split(",")]
    text = "\n".join(f"### {title}\n\n{table(jobs, args.batches)}" for title, table in parts)
    publish(text, args.output)


if __name__ == "__main__":
    main()
