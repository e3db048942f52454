#!/usr/bin/env python3
"""Elastic pipelines compared with packing, for small versions of current models, on this CPU.

    scripts/bench/cpu_models.py [--cases qwen3-moe:16384x10 ...] [--batches N] [-o RESULT.md]

Two pipeline stages (gloo, one core each) run one of these models. The MoE model like Qwen3-MoE has
16 experts, top-k 4, and norms of Q and K. The model like gpt-oss has a sliding window of 128 keys
in every second layer, sinks, biases, YaRN, and 8 experts with top-k 2. nemotron-h is a HybridModel
of Mamba-2, attention and MLPs. nemotron-3 has a multi-token prediction layer in addition;
nemotron-3-by-time has the same layers, with the boundary of the stages that --epp-partition auto
chooses from the measured costs. qwen3-next has gated delta nets, attention and experts. On CPUs,
torch code replaces the kernels that scan states.

Documents are the source text of this Python's standard library, or --data-path; a document longer
than the context is truncated. One job runs every batch in turn with the planners and the budgets of
cpu_pipeline.py; with --lines 100, with only the first three of them. Before that, each of them runs
twice on the first batch, because an op that touches memory for the first time waits for it. The
time is that of the schedule, from the first op to the last op of any stage. The cost model measures
every layer kind separately at the start. Errors of predictions: for seconds the median over
iterations, for memory the maximum over every iteration and stage.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import in_turns
from headline import heading, host, write
from in_turns import (
    LINE,
    VARIANTS,
    WORK,
    Turns,
    Variant,
    VariantSteps,
    corpus_of,
    entries_told,
    take_turns,
    torchrun,
)

_WIDTHS = """
    --hidden-size 128 --num-attention-heads 2 --kv-channels 32 --group-query-attention
    --num-query-groups 1 --normalization RMSNorm --untie-embeddings-and-output-weights
"""
_BALANCED = """
    --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
"""
_COMMON = f"""{_WIDTHS} {_BALANCED}
    --num-layers 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2
"""
_HYBRID = f"""{_WIDTHS}
    --disable-bias-linear --swiglu --position-embedding-type rope --ffn-hidden-size 384
    --mamba-num-heads 8 --mamba-head-dim 32 --mamba-num-groups 2 --mamba-state-dim 32
"""
MODELS = {
    "qwen3-moe": f"""{_COMMON}
        --disable-bias-linear --swiglu --position-embedding-type rope --qk-layernorm
        --ffn-hidden-size 384
        --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 96
    """,
    "gpt-oss": f"""{_COMMON}
        --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
        --position-embedding-type yarn --rotary-scaling-factor 32 --ffn-hidden-size 128
        --window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
    """,
    "nemotron-h": f"{_HYBRID} --hybrid-layer-pattern=M-*-M-|M-*-M-",
    "nemotron-3": f"{_HYBRID} --hybrid-layer-pattern=M-*-M-M-|M-*-/*-",
    "nemotron-3-by-time": f"{_HYBRID} --hybrid-layer-pattern=M-*-M-M-M-*|-/*-",
    "qwen3-next": f"""{_HYBRID} {_BALANCED} --hybrid-layer-pattern=GE*EGE|GE*EGE
        --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 32
        --linear-value-head-dim 32 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96
    """,
}
WARM_UP_ROUNDS = 2
LINES = {"all": VARIANTS, "100": VARIANTS[:3]}
CASES = (
    "qwen3-moe:16384x6",
    "gpt-oss:16384x6",
    "qwen3-moe:8192x8",
    "gpt-oss:8192x8",
    "qwen3-moe:32768x4",
    "gpt-oss:32768x4",
)


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    context: int
    documents: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        found = re.fullmatch(r"([a-z0-9-]+):([1-9][0-9]*)x([1-9][0-9]*)", text)
        if found is None or found[1] not in MODELS:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected MODEL:CONTEXTxDOCUMENTS with a model of {', '.join(MODELS)}"
            )
        return cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.model}:{self.context}x{self.documents}"


# ------------------------------------------------------------------ inside torchrun


def work(variants: Sequence[Variant], warm_up: int, first: int) -> None:
    """Run Megatron's trainer with the plans of all ``variants`` in turn."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    take_turns(variants, VariantSteps, told, warm_up, first)


def told(variant_of, iteration: int, step, report, planning_seconds: float, *others) -> str:
    """Return the entry of ``in_turns.told``, with the predicted peak bytes of every stage."""
    line = in_turns.told(variant_of, iteration, step, report, planning_seconds, *others)
    entry = json.loads(line.removeprefix(LINE))
    entry["predicted_peaks"] = [gib * 2**30 for gib in step.plans[0].predicted.peak_gib]
    return LINE + json.dumps(entry)


# ------------------------------------------------------------------ outside


def flags(case: Case, corpus: Path, iterations: int) -> list[str]:
    text = f"""{MODELS[case.model]}
        --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2
        --seq-length {case.context} --max-position-embeddings {case.context}
        --global-batch-size {case.documents} --train-iters {iterations} --lr 1e-4
        --split 100,0,0 --eval-iters 0 --log-interval 1 --data-path {corpus}
        --tokenizer-type SentencePieceTokenizer --tokenizer-model {corpus}.model --epp
    """
    return text.split()


def measure(case: Case, arguments: argparse.Namespace, corpus: Path, folder: Path) -> list[dict]:
    """Return the entries of all iterations after the warm-up."""
    turns = len(LINES[arguments.lines])
    warm_up = WARM_UP_ROUNDS * turns
    iterations = warm_up + arguments.batches * turns
    words = [*flags(case, corpus, iterations), "--epp-effort", str(arguments.effort)]
    program = [str(Path(__file__).resolve()), WORK, arguments.lines]
    program += [str(warm_up), str(arguments.first)]
    name = str(case).replace(":", "-")
    text = torchrun(program, words, folder / f"{name}.log")
    return entries_told(text, iterations)[warm_up:]


def rows(case: Case, variants: Sequence[Variant], entries: Sequence[dict]) -> list[list[str]]:
    """Return one table row for every variant."""
    turns = Turns(variants, entries)
    return [
        [
            case.model,
            f"{case.context // 1024}K",
            str(case.documents),
            "none" if variant.share_of_peak is None else f"{variant.share_of_peak:.0%}",
            variant.planner,
            f"{turns.median(number, 'seconds'):.2f}",
            f"{turns.ratio(number, 'seconds'):.2f}",
            f"{turns.ratio(number, 'predicted'):.2f}",
            f"{turns.median(number, 'bubble'):.0%}",
            f"{turns.median(number, 'recomputed'):.0%}",
            f"{turns.peak_share(number):.0%}",
            f"{turns.median(number, 'chunks'):.0f}",
            f"{turns.seconds_off(number):+.1%}",
            f"{max(memory_errors(turns.of(number)), key=abs):+.1%}",
        ]
        for number, variant in enumerate(variants)
    ]


def memory_errors(entries: Sequence[dict]) -> list[float]:
    """Return predicted peak / measured peak - 1, for every stage and iteration."""
    return [
        predicted / held - 1
        for entry in entries
        for predicted, held in zip(entry["predicted_peaks"], entry["peaks"], strict=True)
    ]


HEADERS = [
    *("model", "context", "documents", "budget", "planner", "seconds", "ratio", "predicted"),
    *("bubble", "recomputed", "peak", "chunks", "seconds off", "memory off"),
]
LEGEND = """\
ratio: the seconds of packing-best over this line's, same batch and budget, median; predicted: of
the cost model's seconds. recomputed: layers run again whole, of all. peak: the worst stage of the
worst batch, measured, over packing's without recompute. off: predicted over measured, less one;
seconds: median over the batches; memory: the worst stage of the worst batch."""


def summary(cases: Sequence[tuple[Case, list[dict]]]) -> str:
    """Return one line with the errors of the predictions over all cases."""
    entries = [entry for _, some in cases for entry in some]
    seconds = [abs(e["predicted"] / e["seconds"] - 1) for e in entries]
    memory = [abs(error) for error in memory_errors(entries)]
    return (
        f"{len(entries)} iterations: seconds off by {statistics.median(seconds):.1%} in the "
        f"median, {max(seconds):.1%} at worst; memory by {statistics.median(memory):.1%}, "
        f"{max(memory):.1%} at worst."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", type=Case.parse, metavar="MODEL:CONTEXTxDOCUMENTS",
                        default=[Case.parse(case) for case in CASES])  # fmt: skip
    parser.add_argument("--batches", type=int, default=2, help="batches of each case")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument(
        "--lines", choices=LINES, default="all", help="100: within packing's memory only"
    )
    parser.add_argument("--effort", type=int, default=4)
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    arguments = parser.parse_args()

    from megatron_epp.show.table import markdown, text_table

    folder = Path(tempfile.mkdtemp(prefix="cpu_models-"))
    corpus = corpus_of(arguments, folder)
    table: list[list[str]] = []
    measured: list[tuple[Case, list[dict]]] = []
    for case in arguments.cases:
        began = time.monotonic()
        entries = measure(case, arguments, corpus, folder)
        measured.append((case, entries))
        made = rows(case, LINES[arguments.lines], entries)
        print(f"{case}: {time.monotonic() - began:.0f} s", text_table(HEADERS, made), sep="\n",
              flush=True)  # fmt: skip
        table += made
    said = summary(measured)
    print(text_table(HEADERS, table), LEGEND, said, sep="\n")
    hardware = f"{host()}, float32, two processes of one thread"
    write(
        arguments.output,
        f"{heading(hardware)}{markdown(HEADERS, table)}\n{LEGEND}\n\n{said}\n\n",
    )


if __name__ == "__main__":
    if WORK not in sys.argv:
        main()
    else:
        at = sys.argv.index(WORK)
        lines, warm_up, first = sys.argv[at + 1 : at + 4]
        del sys.argv[at : at + 4]
        work(LINES[lines], int(warm_up), int(first))
