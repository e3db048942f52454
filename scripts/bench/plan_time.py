"""How long planning takes: by planner, by batch size, by stages; and cold.

    python scripts/bench/plan_time.py [--parts planners,levers,growth,cold] [-o RESULT.md]

Processor seconds of one core with compiled code warm; the cold start, in which numba compiles, is
measured in a process of its own with an empty cache. Wall time is the same on an idle core.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

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


def by_planner() -> str:
    """Medians over five batches of each distribution."""
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
    """epp, --zero 1 on h100-80g as training runs it; medians over five batches of 512 documents."""
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
    """epp, llama3-70b on h200-141g, wlb: a replica per 512 documents, or one for all."""
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    args = parser.parse_args()
    warm = named_cost("gpt-13b", "a100-80g", pp=4, cp=8)
    batch = open_corpus("wlb", CONTEXT).batch(0, 64)
    for name in COMPARED:
        PLANNERS[name](batch, warm, Options(context=CONTEXT, levers=ALL))
    parts = [PARTS[name] for name in args.parts.split(",")]
    text = "\n".join(f"### {title}\n\n{table()}" for title, table in parts)
    publish(text, args.output)


if __name__ == "__main__":
    main()
