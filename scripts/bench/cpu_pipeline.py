#!/usr/bin/env python3
"""Elastic pipelines against packing, on real documents, on this host's CPU.

    scripts/bench/cpu_pipeline.py [--cases 4096x32 16384x32 ...] [--batches N] [-o RESULT.md]

Two pipeline stages, or --pp (gloo, one core each), 8 layers, hidden 512, 8 heads in 4 groups;
documents are the source text of this Python's standard library, or --data-path. For every batch the
same job runs these in turn, with the same weights, kernels and executor:

    packing, no recompute                 its peak on each stage is the 100% of the budgets below
    epp      within 100% of that peak
    packing  within  60% of that peak     the least uniform recompute that fits
    epp      within  60% of that peak

and with --split both lines of epp again without the lever wsplit (every backward whole); with
--lines 60 the last two alone. What is timed is the schedule, from the first op to the last of any
stage; planning and optimizer are not in it. Medians over the batches of ratios of the same batch.
The cost model is measured at start. With --stock, Megatron's own schedule runs at context 4096
beside it. With --pp 4 on fewer cores than four, processes share them: orders, peaks and splits are
as they would be, seconds and bubbles are not.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from headline import ROOT, heading, host, write

sys.path.insert(0, str(ROOT))


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What plans an iteration, within which share of packing's peak (None: whatever it takes)."""

    planner: str
    share_of_peak: float | None
    split: bool = True

    @property
    def name(self) -> str:
        return self.planner if self.split else f"{self.planner}, no split"


VARIANTS = (
    Variant("packing", None),
    Variant("epp", 1.0),
    Variant("packing", 0.6),
    Variant("epp", 0.6),
)
SPLIT = (*VARIANTS, Variant("epp", 1.0, split=False), Variant("epp", 0.6, split=False))
LINES = {"all": VARIANTS, "100": VARIANTS[:2], "60": VARIANTS[2:], "split": SPLIT}
CASES = ("4096x32", "16384x32", "32768x32", "16384x8", "16384x128")
LINE = "cpu_pipeline: "
WORK = "--work"


# ------------------------------------------------------------------ inside torchrun


def work(variants: Sequence[Variant], warm_up: int, first: int) -> None:
    """Megatron's trainer with the variants' plans in the place of one planner's."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    take_turns(variants, VariantSteps, told, warm_up, first)


def take_turns(variants: Sequence, steps: type, tell: Callable, warm_up: int, first: int) -> None:
    """Train: every batch from ``first`` on with each of the variants in turn.

    steps   makes the plans; it is given the variant of an iteration's number, this rank's place in
            the job, and the model
    tell    what is logged of an iteration; given first which variant it was, by number
    """
    from megatron_epp.mcore import entry
    from megatron_epp.mcore.setup import Hooks

    def variant_of(iteration: int) -> int:
        """Where iteration 1 warms up, it does so with the first variant, as iteration 2."""
        return max(0, iteration - 1 - warm_up) % len(variants)

    entry.main(
        hooks=Hooks(
            make_steps=functools.partial(steps, lambda at: variants[variant_of(at)]),
            make_batches=repeated(len(variants), warm_up, first),
            summary=functools.partial(tell, variant_of),
        )
    )


def repeated(times: int, warm_up: int, first: int) -> type:
    """Global batches from ``first`` on, each given so many times, the first ``warm_up`` more."""
    from megatron_epp.mcore.data.global_batches import GlobalBatches

    class Repeated(GlobalBatches):
        given = 0

        def __next__(self):
            self.consumed = (first + max(0, self.given - warm_up) // times) * self.size
            self.given += 1
            return self.peek()

    return Repeated


class VariantSteps:
    """Plans on rank 0 as the iteration's variant says; the trainer's cost model, another budget."""

    whole: tuple[float, ...] = ()  # what packing holds without recompute, predicted, in bytes

    def __init__(self, variant_at, place, model):
        from megatron_epp.mcore.calibrate.profile_file import obtain
        from megatron_epp.mcore.job_cost import training_cost, training_levers
        from megatron_epp.planner import Options

        args, config = place.args, place.config
        self.variant_at, self.groups = variant_at, place.groups
        profile = obtain(args, config, model, place.groups, place.share)
        self.cost = training_cost(args, config, place.layers, profile)
        self.options = Options(
            context=args.seq_length,
            levers=training_levers(config.epp_levers, args),
            effort=config.epp_effort,
            multiple=place.share.multiple,
        )

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool):
        from megatron_epp.control.planned_steps import shared
        from megatron_epp.control.step_source import SourcedStep

        def plan() -> SourcedStep:
            step = self._plan(iteration, lengths)
            return SourcedStep(step, str(step))

        return shared(plan, self.groups.control)

    def _plan(self, iteration: int, lengths: Sequence[int]):
        from megatron_epp.planner import plan_step

        variant = self.variant_at(iteration)
        levers = self.options.levers - (set() if variant.split else {"wsplit"})
        options = dataclasses.replace(self.options, levers=levers)
        ample = dataclasses.replace(self.cost, budget_bytes=(1e15,) * self.cost.stages)
        if variant.share_of_peak is None:
            return plan_step(lengths, ample, options, variant.planner).step
        whole = plan_step(lengths, ample, options, "packing").planned[0].peak_bytes
        VariantSteps.whole = tuple(float(peak) for peak in whole)
        budget = tuple(variant.share_of_peak * peak for peak in whole)
        within = dataclasses.replace(self.cost, budget_bytes=budget)
        return plan_step(lengths, within, options, variant.planner).step

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        """Planned when asked for: planning is not timed here."""


def told(
    variant_of: Callable, iteration: int, step, report, planning_seconds: float, *others
) -> str:
    """What the trainer logs of an iteration, here as JSON."""
    from megatron_epp.ir import Kind

    plan = step.plans[0]
    recomputed = sum(choice.count("f") for stage in plan.recompute for choice in stage)
    weights = sum(op.kind is Kind.WEIGHT for order in plan.orders for op in order)
    entry = {
        "iteration": iteration,
        "variant": variant_of(iteration),
        "tokens": plan.tokens,
        "seconds": report.seconds,
        "bubble": report.bubble_ratio,
        "own": report.own_ratio,
        "peaks": list(report.peak_bytes),
        "whole": VariantSteps.whole,
        "chunks": len(plan.chunks),
        "recomputed": recomputed / (len(plan.chunks) * sum(plan.layers)),
        "split": weights / (len(plan.chunks) * plan.stages),
        "predicted": plan.predicted.seconds,
        "plan_seconds": planning_seconds,
    }
    return LINE + json.dumps(entry)


# ------------------------------------------------------------------ outside


def flags(
    corpus: Path, context: int, batch: int, iterations: int, dtype: str, stages: int = 2
) -> list[str]:
    text = f"""
        --num-layers 8 --hidden-size 512 --ffn-hidden-size 1376 --num-attention-heads 8
        --group-query-attention --num-query-groups 4 --normalization RMSNorm --swiglu
        --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --pipeline-model-parallel-size {stages} --seq-length {context}
        --max-position-embeddings {context} --global-batch-size {batch}
        --train-iters {iterations} --lr 1e-4 --split 100,0,0 --eval-iters 0 --log-interval 1
        --data-path {corpus} --tokenizer-type SentencePieceTokenizer
        --tokenizer-model {corpus}.model
    """
    return text.split() + (["--bf16"] if dtype == "bf16" else [])


def corpus_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """The prefix of --data-path, or of a corpus made in ``folder`` from Python's own source."""
    if arguments.data_path:
        return Path(arguments.data_path)
    prefix = folder / "stdlib"
    prepare = [sys.executable, str(ROOT / "scripts" / "prepare_corpus.py")]
    prepare += ["--standard-library", "--shuffle", "1", "--append-eod", "-o", str(prefix)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    return prefix


def torchrun(program: list[str], words: list[str], log: Path, processes: int = 2) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *program, *words]
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"cpu_pipeline: a run failed; its log is {log}\n{tail}")
    return log.read_text(errors="replace")


def measure(
    case: str,
    variants: Sequence[Variant],
    arguments: argparse.Namespace,
    corpus: Path,
    folder: Path,
) -> list[dict]:
    context, batch = map(int, case.split("x"))
    iterations = arguments.warm_up + arguments.batches * len(variants)
    words = flags(corpus, context, batch, iterations, arguments.dtype, arguments.pp)
    words += ["--epp", "--epp-effort", str(arguments.effort)]
    if arguments.cost_model:
        words += ["--epp-cost-model", arguments.cost_model]
    program = [str(Path(__file__).resolve()), WORK, arguments.lines]
    program += [str(arguments.warm_up), str(arguments.first)]
    text = torchrun(program, words, folder / f"{case}.log", arguments.pp)
    entries = [json.loads(found) for found in re.findall(LINE + r"(\{.*?\})", text)]
    assert len(entries) == iterations, f"{len(entries)} of {iterations} iterations were told"
    return entries[arguments.warm_up :]


def rows(case: str, variants: Sequence[Variant], entries: list[dict]) -> list[list[str]]:
    context, batch = case.split("x")
    by_batch = [
        {entry["variant"]: entry for entry in entries[start : start + len(variants)]}
        for start in range(0, len(entries), len(variants))
    ]
    made = []
    for number, variant in enumerate(variants):
        mine = [found[number] for found in by_batch]
        tight = variant.share_of_peak == 0.6
        against = variants.index(Variant("packing", 0.6 if tight else None))
        measured = Variant("packing", None) in variants
        ratios = [b[against]["seconds"] / b[number]["seconds"] for b in by_batch]
        peak_shares = [
            max(
                held / whole
                for held, whole in zip(
                    b[number]["peaks"], b[0]["peaks" if measured else "whole"], strict=True
                )
            )
            for b in by_batch
        ]
        errors = [m["predicted"] / m["seconds"] - 1 for m in mine]
        predicted = [b[against]["predicted"] / b[number]["predicted"] for b in by_batch]
        made.append(
            [
                f"{int(context) // 1024}K",
                batch,
                "none" if variant.share_of_peak is None else f"{variant.share_of_peak:.0%}",
                variant.name,
                f"{statistics.median(m['tokens'] / m['seconds'] for m in mine):.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{statistics.median(predicted):.2f}",
                f"{statistics.median(m['bubble'] for m in mine):.1%}",
                f"{statistics.median(m['recomputed'] for m in mine):.1%}",
                f"{max(peak_shares):.0%}",
                f"{statistics.median(m['chunks'] for m in mine):.0f}",
                f"{statistics.median(errors):+.0%}",
                f"{statistics.median(m['split'] for m in mine):.0%}",
                f"{max(m['own'] for m in mine):.2%}",
            ]
        )
    return made


HEADERS = [
    *("context", "documents", "budget", "planner", "tokens/s", "ratio", "predicted", "bubble"),
    *("recomputed", "peak", "chunks", "off by", "split", "executor"),
]
LEGEND = """\
ratio: packing's seconds over this line's, same batch and budget, median. predicted: the same of
the cost model's seconds. recomputed: layers run again whole, of all. peak: the worst stage of the
worst batch, measured, over packing's without recompute (where --lines 60 leaves that line out:
over what is predicted of it; a budget bounds the predicted peak). off by: predicted over measured
seconds, less one. split: backwards run as I and W, of all. executor: its own time between ops,
neither compute nor waiting, worst stage and iteration."""


def stock(arguments: argparse.Namespace, corpus: Path, folder: Path) -> str:
    """Megatron's own schedule at context 4096, 32 samples: tokens per second of its schedule.
    The first iteration warms up."""
    words = [*flags(corpus, 4096, 32, 2, arguments.dtype, arguments.pp), "--micro-batch-size", "1"]
    program = [str(Path(__file__).with_name("stock.py"))]
    text = torchrun(program, words, folder / "stock.log", arguments.pp)
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
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument(
        "--warm-up",
        type=int,
        choices=(0, 1),
        default=1,
        help="iterations before; 0: for long cases",
    )
    parser.add_argument("--pp", type=int, choices=(2, 4), default=2, help="stages")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--effort", type=int, default=4)
    parser.add_argument("--cost-model", metavar="FILE", help="instead of measuring at start")
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument(
        "--lines",
        choices=("all", "100", "60"),
        default="all",
        help="within 100%% or 60%% of packing's memory only: for cases of hours",
    )
    lines.add_argument(
        "--split",
        dest="lines",
        action="store_const",
        const="split",
        help="all, and epp without wsplit beside epp",
    )
    parser.add_argument("--stock", action="store_true", help="Megatron's own schedule too, at 4K")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    arguments = parser.parse_args()

    from megatron_epp.show.table import markdown, plain

    folder = Path(tempfile.mkdtemp(prefix="cpu_pipeline-"))
    corpus = corpus_of(arguments, folder)
    variants, table = LINES[arguments.lines], []
    for case in arguments.cases:
        print(f"{case}: {arguments.batches} batches x {len(variants)} variants ...", flush=True)
        made = rows(case, variants, measure(case, variants, arguments, corpus, folder))
        print(plain(HEADERS, made), flush=True)
        table += made
    beside = stock(arguments, corpus, folder) if arguments.stock else ""
    print(plain(HEADERS, table), LEGEND, beside, sep="\n")
    hardware = f"{host()}, {arguments.dtype}, {arguments.pp} processes of one thread"
    write(
        arguments.output,
        f"{heading(hardware)}{markdown(HEADERS, table)}\n{LEGEND}\n\n{beside}\n\n",
    )


if __name__ == "__main__":
    if WORK not in sys.argv:
        main()
    else:
        at = sys.argv.index(WORK)
        lines, warm_up, first = sys.argv[at + 1 : at + 4]
        del sys.argv[at : at + 4]
        work(LINES[lines], int(warm_up), int(first))
