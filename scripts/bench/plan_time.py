"""CPU time of planning: by planner, by batch size, by number of stages, and after a cold start.

    python scripts/bench/plan_time.py [--parts planners,levers,growth,cold,jobs] [-o RESULT.md]
    python scripts/bench/plan_time.py --parts jobs --against CHECKOUT [--jobs NAME ...]

Times are processor seconds of one core with loaded compiled code. The cold start, in which numba
compiles, is measured in a new process with an empty cache. Wall time is the same on an idle core.
The part `jobs` runs in new processes, alternating between this checkout and the one that
``--against`` names; it includes the seconds of child processes.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headline import ROOT, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.planner import ALL, COMPARED, PLANNERS, Options, plan_step
from megatron_epp.show.table import markdown

K = 1024
CONTEXT = 96 * K
CORPORA = ("wlb", "prolong", "wikipedia")
COLD = """
import time
began = time.perf_counter()
from megatron_epp.cost.build import named_cost
from megatron_epp.planner import ALL, Options, plan_step
from megatron_epp.corpus.lengths import open_corpus
imported = time.perf_counter()
lengths = open_corpus("wlb", 98304).batch(20, 512)
cost = named_cost("gpt-13b", "a100-80g", pp=4, cp=8)
begun = time.process_time()
plan_step(lengths, cost, Options(context=98304, levers=ALL), "epp", 1)
print(imported - began, time.process_time() - begun)
"""
# Model, device, then pp, tp, cp and the context in thousands; each plans 512 documents of `wlb`.
JOBS = {
    "13b-pp4": ("gpt-13b", "a100-80g", 4, 1, 8, 96),
    "13b-pp8": ("gpt-13b", "a100-80g", 8, 1, 4, 96),
    "8b-pp4": ("llama3-8b", "h100-80g", 4, 1, 8, 128),
    "70b-pp8": ("llama3-70b", "h100-80g", 8, 8, 1, 128),
    "70b-pp16": ("llama3-70b", "h100-80g", 16, 8, 1, 128),
    "q235-pp8": ("qwen3-235b-a22b", "h100-80g", 8, 4, 2, 128),
}
# The same, of choosing vocabulary parallelism at the start of a run.
CHOICES = {
    "70b-pp4": ("llama3-70b", "h100-80g", 4, 8, 2, 128),
    "q235-pp8": JOBS["q235-pp8"],
}
JOB_BATCHES = (30, 31, 32)
ONE_JOB = """
import hashlib, json, os, sys
(model, device, pp, tp, cp, thousands), effort, choose = json.loads(sys.argv[1])
from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.planner import Options, plan_step
from megatron_epp.planner.choose.choice import vocabulary_of
from megatron_epp.planner.options import default_levers
context = thousands * 1024
corpus = open_corpus("wlb", context)
cost = named_cost(model, device, pp=pp, tp=tp, cp=cp, **AS_TRAINED)
options = Options(context=context, levers=default_levers(device), effort=effort)
def run(number, documents=512):
    batch = corpus.batch(number, documents)
    if choose:
        return vocabulary_of(cost, [batch], options, "epp").seconds.values()
    step = plan_step(batch, cost, options, "epp", 1)
    return [str(step.step), max(each.seconds for each in step.planned)]
def spent():
    return sum(os.times()[:4])
for vocabulary in (False, True):
    plan_step(corpus.batch(0, 64), cost.with_vocabulary(vocabulary), options, "epp", 1)
print(flush=True)
for line in sys.stdin:
    began = spent()
    *text, seconds = run(int(line))
    taken = spent() - began
    print(json.dumps([taken, hashlib.sha256(repr(text).encode()).hexdigest(), seconds]), flush=True)
"""


def by_job(args: argparse.Namespace) -> str:
    """Return the CPU seconds of each job's plans, and of the choice of vocabulary parallelism.

    The table compares both checkouts, with predicted seconds of the plans, and the number of equal
    plans.
    """
    roots = [Path(args.against).resolve(), ROOT] if args.against else [ROOT]
    rows = []
    for choose, jobs in ((False, JOBS), (True, CHOICES)):
        for name, job in jobs.items():
            if args.jobs and name not in args.jobs:
                continue
            batches = JOB_BATCHES[:1] if choose else JOB_BATCHES
            results = _in_turn(roots, json.dumps([job, args.effort, choose]), batches, args.turns)
            # The least of the turns: what runs beside only ever adds. The median of the batches.
            least = [
                [min(taken[0] for taken in results[root, number]) for number in batches]
                for root in roots
            ]
            middle = [statistics.median(each) for each in least]
            cells = [f"{name}{', choice' * choose}", *(f"{seconds:.2f}" for seconds in middle)]
            if args.against:
                old, new = ([results[root, number][0] for number in batches] for root in roots)
                same = sum(a[1:] == b[1:] for a, b in zip(old, new, strict=True))
                ratios = [b[2] / a[2] for a, b in zip(old, new, strict=True)]
                cells += [f"{middle[1] / middle[0]:.2f}", f"{same} of {len(batches)}"]
                cells.append("-" if choose else f"{statistics.median(ratios):.4f}")
            rows.append(cells)
            print(cells, file=sys.stderr, flush=True)
    heads = ["before", "after", "after / before", "same plans", "iteration after / before"]
    return markdown(["job", *(heads if args.against else ["CPU s"])], rows)


def _in_turn(
    roots: Sequence[Path], job: str, batches: Sequence[int], turns: int
) -> dict[tuple[Path, int], list[list]]:
    """Return the answers of every checkout for every batch.

    The checkouts plan in turn, one plan at a time, so that load from other programs affects both
    equally.
    """
    workers = {
        root: subprocess.Popen(
            [sys.executable, "-c", ONE_JOB, job],
            cwd=root,  # where `-c` looks for modules first
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for root in roots
    }
    results: dict[tuple[Path, int], list[list]] = {}
    for worker in workers.values():
        worker.stdout.readline()  # it is warm
    for _ in range(turns):
        for number in batches:
            for root, worker in workers.items():
                worker.stdin.write(f"{number}\n")
                worker.stdin.flush()
                results.setdefault((root, number), []).append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return results


def by_planner() -> str:
    """Return medians over five batches of each distribution, for every planner."""
    headers = ["planner", *(f"pp {pp}, {name}" for pp in (4, 8) for name in ("wlb", "wikipedia"))]
    rows = []
    for name in COMPARED:
        cells = [name]
        for pp in (4, 8):
            cost = named_cost("gpt-13b", "a100-80g", pp=pp, cp=8)
            for lengths in ("wlb", "wikipedia"):
                corpus, taken = open_corpus(lengths, CONTEXT), []
                for number in range(20, 25):
                    batch = corpus.batch(number, 512)
                    began = time.process_time()
                    PLANNERS[name](batch, cost, Options(context=CONTEXT, levers=ALL))
                    taken.append(time.process_time() - began)
                cells.append(f"{statistics.median(taken):.2f} (most {max(taken):.2f})")
        rows.append(cells)
    return markdown(headers, rows)


# Model, pp, cp, context in thousands.
TRAINED = (
    ("llama3-8b", 4, 8, 32),
    ("llama3-8b", 4, 8, 128),
    ("gpt-13b", 4, 8, 96),
    ("gpt-13b", 8, 4, 96),
    ("gemma3-27b", 8, 4, 128),
)


def with_every_lever() -> str:
    """Return medians for epp over five batches of 512 documents.

    The setting is that of training: --zero 1 on h100-80g.
    """
    headers = [
        "model, levers",
        *(f"{how}, {name}" for how in ("vocabulary cut", "not") for name in CORPORA),
    ]
    rows = []
    every = [
        (*model, levers)
        for levers in (("of training", Options().levers), ("all, offload too", ALL))
        for model in TRAINED
    ]
    for name, pp, cp, thousands, (title, levers) in every:
        cells = [f"{name} pp {pp}, {thousands}K, {title}"]
        whole = named_cost(name, "h100-80g", pp=pp, cp=cp, zero=1, **AS_TRAINED)
        for cost in (whole.with_vocabulary(True), whole):
            for lengths in CORPORA:
                corpus, taken = open_corpus(lengths, thousands * K), []
                for number in range(30, 35):
                    batch = corpus.batch(number, 512)
                    began = time.process_time()
                    PLANNERS["epp"](batch, cost, Options(context=thousands * K, levers=levers))
                    taken.append(time.process_time() - began)
                cells.append(f"{statistics.median(taken):.2f} (most {max(taken):.2f})")
        rows.append(cells)
        print(cells, file=sys.stderr, flush=True)
    return markdown(headers, rows)


def by_size() -> str:
    """Return times of epp, llama3-70b on h200-141g, wlb: 512 documents per replica, or in one."""
    headers = ["documents", "stages", "replicas", "CPU s", "of it per replica", "chunks of a plan"]
    rows = []
    setups = [
        (128, 8, 1),
        (512, 8, 1),
        (2048, 8, 1),
        (512, 16, 1),
        (512, 32, 1),
        (512, 64, 1),
        (2048, 8, 4),
        (8192, 8, 16),
        (8192, 64, 16),
    ]
    for documents, stages, replicas in setups:
        cost = named_cost("llama3-70b", "h200-141g", pp=stages, cp=8, dp=replicas)
        batch = open_corpus("wlb", CONTEXT).batch(2, documents)
        began = time.process_time()
        made = plan_step(batch, cost, Options(context=CONTEXT, levers=ALL), "epp", replicas)
        taken = time.process_time() - began
        print(f"{documents} {stages} {replicas}: {taken:.2f} s", file=sys.stderr, flush=True)
        chunks = statistics.median(planned.chunks for planned in made.planned)
        setup = map(str, (documents, stages, replicas))
        rows.append([*setup, f"{taken:.2f}", f"{taken / replicas:.2f}", f"{chunks:g}"])
    return markdown(headers, rows)


def cold() -> str:
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "NUMBA_CACHE_DIR": empty, "PYTHONPATH": str(ROOT)}
        run = [sys.executable, "-c", COLD]
        texts = [
            subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
            for _ in range(2)
        ]
    found = ([f"{float(seconds):.1f}" for seconds in text.split()] for text in texts)
    names = ("empty cache", "compiled code on disk")
    rows = [[name, *seconds] for name, seconds in zip(names, found, strict=True)]
    return markdown(["", "import s", "first plan, CPU s"], rows)


PARTS = {
    "planners": ("One replica, 512 documents, gpt-13b, 96K (CPU s)", by_planner),
    "levers": (
        "Vocabulary parallelism and local documents among the levers (CPU s)",
        with_every_lever,
    ),
    "growth": ("Growth", by_size),
    "cold": ("Cold start", cold),
    "jobs": ("Jobs of several models, 512 documents (CPU s)", by_job),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--against", metavar="CHECKOUT", help="of part jobs: compare with it")
    parser.add_argument("--jobs", nargs="+", metavar="NAME", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--turns", type=int, default=4, help="of part jobs, of each batch")
    parser.add_argument("--effort", type=int, default=Options().effort, help="of part jobs")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    args = parser.parse_args()
    if args.parts != "jobs":  # whose processes warm up themselves
        warm = named_cost("gpt-13b", "a100-80g", pp=4, cp=8)
        batch = open_corpus("wlb", CONTEXT).batch(0, 64)
        for name in COMPARED:
            PLANNERS[name](batch, warm, Options(context=CONTEXT, levers=ALL))
    parts = dict(PARTS, jobs=(PARTS["jobs"][0], functools.partial(by_job, args)))
    chosen = [parts[name] for name in args.parts.split(",")]
    text = "\n".join(f"### {title}\n\n{table()}" for title, table in chosen)
    publish(text, args.output)


if __name__ == "__main__":
    main()
