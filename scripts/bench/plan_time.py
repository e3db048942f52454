"""CPU time of planning jobs of several models, in this checkout, or in two checkouts in turn.

    python scripts/bench/plan_time.py [--jobs NAME ...] [--against CHECKOUT] [-o RESULT.md]

Times are processor seconds, child processes included, of new processes whose compiled code is
loaded; wall time is the same on an idle core. With ``--against``, this checkout and the other one
plan in turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from headline import ROOT, markdown, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.planner.options import Options

# Model, device, then pp, tp, cp and the context in thousands; each plans 512 documents of `wlb`.
JOBS = {
    "13b-pp4": ("gpt-13b", "a100-80g", 4, 1, 8, 96),
    "13b-pp8": ("gpt-13b", "a100-80g", 8, 1, 4, 96),
    "8b-pp4": ("llama3-8b", "h100-80g", 4, 1, 8, 128),
    "70b-pp8": ("llama3-70b", "h100-80g", 8, 8, 1, 128),
    "70b-pp16": ("llama3-70b", "h100-80g", 16, 8, 1, 128),
    "q235-pp8": ("qwen3-235b-a22b", "h100-80g", 8, 4, 2, 128),
}
# The same, of choosing placement, layers and vocabulary parallelism at the start of a run.
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
from megatron_epp.planner.options import Options
from megatron_epp.planner.replicas import plan_step
from megatron_epp.planner.choose.choice import PLACEMENT_NAMES, run_choice
from megatron_epp.planner.options import default_levers
context = thousands * 1024
corpus = open_corpus("wlb", context)
cost = named_cost(model, device, pp=pp, tp=tp, cp=cp, **AS_TRAINED)
options = Options(context=context, levers=default_levers(device), effort=effort)
def run(number, documents=512):
    batch = corpus.batch(number, documents)
    if choose:
        how = {"placements": PLACEMENT_NAMES, "vocabularies": (False, True)}
        return run_choice(cost, [batch], options, "epp", **how).seconds.values()
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

    With two checkouts, also the number of equal plans, and the ratio of predicted seconds.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", metavar="CHECKOUT", help="compare with it")
    parser.add_argument("--jobs", nargs="+", metavar="NAME", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--turns", type=int, default=4, help="of each batch")
    parser.add_argument("--effort", type=int, default=Options().effort)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    publish(f"### 512 documents (CPU s)\n\n{by_job(args)}", args.output)


if __name__ == "__main__":
    main()
