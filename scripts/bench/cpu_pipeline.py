#!/usr/bin/env python3
"""Elastic pipelines against packing, on real documents, on this host's CPU.

    scripts/bench/cpu_pipeline.py [--cases 4096x32 16384x32 ...] [--batches N] [-o RESULT.md]

Two pipeline stages (gloo, one core each), 8 layers, hidden 512, 8 heads in 4 groups; documents are
the source text of this Python's standard library, or --data-path. For every batch the same job runs
these in turn, with the same weights, kernels and executor:

    packing, no recompute                 its peak on each stage is the 100% of the budgets below
    epp      within 100% of that peak
    packing  within  60% of that peak     the least uniform recompute that fits
    epp      within  60% of that peak

What is timed is the schedule, from the first op to the last of any stage; planning and optimizer
are not in it. Medians over the batches of ratios of the same batch. The cost model is measured at
start. With --stock, Megatron's own schedule runs at context 4096 beside it.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

VARIANTS = (("packing", None), ("epp", 1.0), ("packing", 0.6), ("epp", 0.6))
CASES = ("4096x32", "16384x32", "32768x32", "16384x8", "16384x128")
LINE = "cpu_pipeline: "


# ------------------------------------------------------------------ inside torchrun


def work() -> None:
    """Megatron's trainer with the variants' plans in the place of one planner's."""
    from megatron_epp.mcore import host

    host.install_cpu_host()
    from megatron_epp.mcore import elastic, entry, schedule

    elastic.make_planning = VariantSteps
    elastic.GlobalBatches = repeated(elastic.GlobalBatches)
    schedule.summary = told
    entry.main()


def variant_of(iteration: int) -> int:
    """Iteration 1 warms up with the first variant, which iteration 2 then repeats."""
    return max(0, iteration - 2) % len(VARIANTS)


def repeated(batches: type) -> type:
    """Global batches, each given as often as there are variants, the first once more."""

    class Repeated(batches):
        given = 0

        def __next__(self):
            batch = self.peek()
            self.given += 1
            if self.given > 1 and (self.given - 1) % len(VARIANTS) == 0:
                self.consumed += self.size
            return batch

    return Repeated


class VariantSteps:
    """Plans on rank 0 as the iteration's variant says; the trainer's cost model, another budget."""

    budget = None  # every variant has its own

    def __init__(self, args, config, layers, multiple, groups, profile):
        from megatron_epp.mcore.planning import training_cost
        from megatron_epp.planner import Options

        self.groups = groups
        self.cost = training_cost(args, config, layers, profile)
        self.options = Options(context=args.seq_length, effort=config.epp_effort, multiple=multiple)

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool):
        from megatron_epp.ir import Step
        from megatron_epp.runtime.agree import share

        text = error = None
        if self.groups.control.rank() == 0:
            try:
                text = str(self._plan(iteration, lengths))
            except ValueError as refusal:
                error = str(refusal)
        return Step.parse(share(text, error, self.groups.control))

    def _plan(self, iteration: int, lengths: Sequence[int]):
        from megatron_epp.planner import plan_step

        planner, share_of_peak = VARIANTS[variant_of(iteration)]
        ample = dataclasses.replace(self.cost, budget_bytes=(1e15,) * self.cost.stages)
        if share_of_peak is None:
            return plan_step(lengths, ample, self.options, planner).step
        kept = plan_step(lengths, ample, self.options, "packing").planned[0].peak_bytes
        budget = tuple(share_of_peak * peak for peak in kept)
        within = dataclasses.replace(self.cost, budget_bytes=budget)
        return plan_step(lengths, within, self.options, planner).step

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        """Planned when asked for: planning is not timed here."""


def told(iteration: int, step, report, planning_seconds: float, *others) -> str:
    """What the trainer logs of an iteration, here as JSON."""
    plan = step.plans[0]
    recomputed = sum(choice.count("f") for stage in plan.recompute for choice in stage)
    entry = {
        "iteration": iteration,
        "variant": variant_of(iteration),
        "tokens": plan.tokens,
        "seconds": report.seconds,
        "bubble": report.bubble_ratio,
        "own": report.own_ratio,
        "peaks": list(report.peak_bytes),
        "chunks": len(plan.chunks),
        "recomputed": recomputed / (len(plan.chunks) * sum(plan.layers)),
        "predicted": plan.predicted.seconds if plan.predicted else None,
        "plan_seconds": planning_seconds,
    }
    return LINE + json.dumps(entry)


# ------------------------------------------------------------------ outside


def flags(corpus: Path, context: int, batch: int, iterations: int, dtype: str) -> list[str]:
    text = f"""
        --num-layers 8 --hidden-size 512 --ffn-hidden-size 1376 --num-attention-heads 8
        --group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu
        --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --pipeline-model-parallel-size 2 --seq-length {context}
        --max-position-embeddings {context} --global-batch-size {batch}
        --train-iters {iterations} --lr 1e-4 --split 100,0,0 --eval-iters 0 --log-interval 1
        --data-path {corpus} --tokenizer-type SentencePieceTokenizer
        --tokenizer-model {corpus}.model
        --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 3
    """
    return text.split() + (["--bf16"] if dtype == "bf16" else [])


def torchrun(program: list[str], words: list[str], log: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *program, *words]
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"cpu_pipeline: a run failed; its log is {log}\n{tail}")
    return log.read_text(errors="replace")


def measure(case: str, arguments: argparse.Namespace, corpus: Path, folder: Path) -> list[dict]:
    context, batch = map(int, case.split("x"))
    iterations = 1 + arguments.batches * len(VARIANTS)
    words = flags(corpus, context, batch, iterations, arguments.dtype)
    words += ["--epp", "--epp-effort", str(arguments.effort)]
    if arguments.cost_model:
        words += ["--epp-cost-model", arguments.cost_model]
    text = torchrun([str(Path(__file__).resolve()), "--work"], words, folder / f"{case}.log")
    entries = [json.loads(found) for found in re.findall(LINE + r"(\{.*?\})", text)]
    assert len(entries) == iterations, f"{len(entries)} of {iterations} iterations were told"
    return entries[1:]


def rows(case: str, entries: list[dict]) -> list[list[str]]:
    context, batch = case.split("x")
    by_batch = [
        {entry["variant"]: entry for entry in entries[start : start + len(VARIANTS)]}
        for start in range(0, len(entries), len(VARIANTS))
    ]
    made = []
    for number, (planner, share_of_peak) in enumerate(VARIANTS):
        mine = [found[number] for found in by_batch]
        against = 0 if number < 2 else 2
        ratios = [b[against]["seconds"] / b[number]["seconds"] for b in by_batch]
        peak_shares = [
            max(m / k for m, k in zip(b[number]["peaks"], b[0]["peaks"], strict=True))
            for b in by_batch
        ]
        errors = [m["predicted"] / m["seconds"] - 1 for m in mine if m["predicted"]]
        made.append(
            [
                f"{int(context) // 1024}K",
                batch,
                "no recompute" if share_of_peak is None else f"{share_of_peak:.0%}",
                planner,
                f"{statistics.median(m['tokens'] / m['seconds'] for m in mine):.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{statistics.median(m['bubble'] for m in mine):.1%}",
                f"{statistics.median(m['recomputed'] for m in mine):.1%}",
                f"{max(peak_shares):.0%}",
                f"{statistics.median(m['chunks'] for m in mine):.0f}",
                f"{statistics.median(errors):+.0%}" if errors else "",
                f"{max(m['own'] for m in mine):.2%}",
            ]
        )
    return made


HEADERS = [
    *("context", "documents", "budget", "planner", "tokens/s", "ratio", "bubble", "recomputed"),
    *("peak", "chunks", "predicted", "executor"),
]
LEGEND = """\
ratio: packing's seconds over this line's, same batch and budget, median. recomputed: layers run
again, of all. peak: the worst stage of the worst batch, measured, over packing's without recompute
(a budget is a promise on the predicted peak). predicted: predicted over measured seconds, less
one. executor: its own time between ops, neither compute nor waiting, worst stage and iteration."""


def stock(arguments: argparse.Namespace, corpus: Path, folder: Path) -> str:
    """Megatron's own schedule at context 4096, 32 samples: tokens per second of its schedule."""
    words = [*flags(corpus, 4096, 32, 3, arguments.dtype), "--micro-batch-size", "1"]
    text = torchrun([str(Path(__file__).with_name("stock.py"))], words, folder / "stock.log")
    seconds: dict[int, float] = {}
    for found in re.findall(r"stock (\{.*?\})", text):
        entry = json.loads(found)
        number = entry["iteration"]
        seconds[number] = max(seconds.get(number, 0.0), entry["seconds"])
    rate = statistics.median(4096 * 32 / seconds[n] for n in sorted(seconds)[1:])
    return (
        f"Megatron's own schedule, context 4K, 32 samples of 4096 tokens (documents strung "
        f"together): {rate:.0f} tokens/s. Its attention on a CPU is unfused."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="CONTEXTxDOCUMENTS")
    parser.add_argument("--batches", type=int, default=3, help="batches of each case")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--effort", type=int, default=4)
    parser.add_argument("--cost-model", metavar="FILE", help="instead of measuring at start")
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("--stock", action="store_true", help="Megatron's own schedule too, at 4K")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    arguments = parser.parse_args()

    from megatron_epp.show.table import markdown, plain

    folder = Path(tempfile.mkdtemp(prefix="cpu_pipeline-"))
    corpus = Path(arguments.data_path) if arguments.data_path else folder / "stdlib"
    if not arguments.data_path:
        prepare = [sys.executable, str(ROOT / "scripts" / "prepare_corpus.py")]
        prepare += ["--standard-library", "--shuffle", "1", "--append-eod", "-o", str(corpus)]
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    table = []
    for case in arguments.cases:
        print(f"{case}: {1 + arguments.batches * len(VARIANTS)} iterations ...", flush=True)
        made = rows(case, measure(case, arguments, corpus, folder))
        print(plain(HEADERS, made), flush=True)
        table += made
    beside = stock(arguments, corpus, folder) if arguments.stock else ""
    print(plain(HEADERS, table), LEGEND, beside, sep="\n")
    if arguments.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        processor = next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            "unknown processor",
        )
        with open(arguments.output, "a", encoding="utf-8") as out:
            out.write(
                f"## {datetime.date.today()}, commit {commit or 'unknown'}\n\n"
                f"`{' '.join(['scripts/bench/cpu_pipeline.py', *sys.argv[1:]])}`\n\n"
                f"{processor}, {os.cpu_count()} cores, {arguments.dtype}, two processes of one "
                f"thread.\n\n{markdown(HEADERS, table)}\n{LEGEND}\n\n{beside}\n\n"
            )


if __name__ == "__main__":
    if "--work" in sys.argv:
        sys.argv.remove("--work")
        work()
    else:
        main()
