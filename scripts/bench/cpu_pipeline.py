#!/usr/bin/env python3
"""Elastic pipelines compared with packing, on real documents, on this host's CPU.

    scripts/bench/cpu_pipeline.py [--cases 4096x32 16384x32 ...] [--batches N] [-o RESULT.md]

A pipeline has two stages, or --pp (gloo, one core each), 8 layers, hidden 512, 8 heads in 4 groups.
Documents are the source text of this Python's standard library, or --data-path. For every
batch, one job runs these variants in turn, with the same weights, kernels and executor:

    packing, no recompute                 packed to the context; its peak on each stage is 100% of
                                          the budgets below
    packing-best  within 100% of that peak    packed to the best length for the batch
    epp           within 100% of that peak
    packing-best  within  60% of that peak    the cheapest uniform recompute that fits
    epp           within  60% of that peak

With --split, both variants of epp run again without the lever wsplit (no split backwards). With
--lines 60, only the last two variants run. The time is that of the schedule, from the first op to
the last op of any stage, without planning and optimizer. The table has medians, over the batches,
of ratios between variants of the same batch. Each job measures its cost model at the start. With
--stock, Megatron's own schedule also runs, at context 4096. With --pp 4 on fewer than four cores,
processes share cores: orders, peaks and splits remain valid, seconds and bubbles do not.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headline import abreast, heading, host, write
from in_turns import (
    VARIANTS,
    WORK,
    Turns,
    Variant,
    VariantSteps,
    corpus_of,
    entries_told,
    take_turns,
    told,
    torchrun,
)

SPLIT = (*VARIANTS, Variant("epp", 1.0, split=False), Variant("epp", 0.6, split=False))
LINES = {"all": VARIANTS, "100": VARIANTS[:3], "60": VARIANTS[3:], "split": SPLIT}
CASES = ("4096x32", "16384x32", "32768x32", "16384x8", "16384x128")


# ------------------------------------------------------------------ inside torchrun


def work(variants: Sequence[Variant], warm_up: int, first: int) -> None:
    """Run Megatron's trainer with the plans of all ``variants`` in turn."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    take_turns(variants, VariantSteps, told, warm_up, first)


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
    return entries_told(text, iterations)[arguments.warm_up :]


def rows(case: str, variants: Sequence[Variant], entries: list[dict]) -> list[list[str]]:
    context, batch = case.split("x")
    turns = Turns(variants, entries)
    return [
        [
            f"{int(context) // 1024}K",
            batch,
            "none" if variant.share_of_peak is None else f"{variant.share_of_peak:.0%}",
            variant.name,
            f"{statistics.median(m['tokens'] / m['seconds'] for m in turns.of(number)):.0f}",
            f"{turns.ratio(number, 'seconds'):.2f}",
            f"{turns.ratio(number, 'predicted'):.2f}",
            f"{turns.median(number, 'bubble'):.1%}",
            f"{turns.median(number, 'recomputed'):.1%}",
            f"{turns.peak_share(number):.0%}",
            f"{turns.median(number, 'chunks'):.0f}",
            f"{turns.seconds_off(number):+.0%}",
            f"{turns.median(number, 'split'):.0%}",
            f"{max(m['own'] for m in turns.of(number)):.2%}",
        ]
        for number, variant in enumerate(variants)
    ]


HEADERS = [
    *("context", "documents", "budget", "planner", "tokens/s", "ratio", "predicted", "bubble"),
    *("recomputed", "peak", "chunks", "off by", "split", "executor"),
]
LEGEND = """\
ratio: the seconds of packing-best over this line's, same batch and budget, median. predicted: the
same of the cost model's seconds. recomputed: layers run again whole, of all. peak: the worst stage
of the worst batch, measured, over packing's without recompute (where --lines 60 leaves that line
out: over what is predicted of it; a budget bounds the predicted peak). off by: predicted over
measured seconds, less one. split: backwards run as I and W, of all. executor: its own time between
ops, neither compute nor waiting, worst stage and iteration."""


def stock(arguments: argparse.Namespace, corpus: Path, folder: Path) -> str:
    """Return a line with tokens per second of Megatron's own schedule: context 4096, 32 samples.

    The first iteration warms up.
    """
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

    from megatron_epp.show.table import markdown, text_table

    folder = Path(tempfile.mkdtemp(prefix="cpu_pipeline-"))
    corpus = corpus_of(arguments, folder)
    variants, table = LINES[arguments.lines], []
    for case in arguments.cases:
        print(f"{case}: {arguments.batches} batches x {len(variants)} variants ...", flush=True)
        made = rows(case, variants, measure(case, variants, arguments, corpus, folder))
        print(text_table(HEADERS, made), flush=True)
        table += made
    beside = stock(arguments, corpus, folder) if arguments.stock else ""
    print(text_table(HEADERS, table), LEGEND, beside, sep="\n")
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[arguments.dtype]
    hardware = (
        f"{host()}, {arguments.dtype}, {arguments.pp} processes of one thread, which at once do "
        f"{abreast(arguments.pp, dtype):.2f} times the work of one alone"
    )
    print(hardware)
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
