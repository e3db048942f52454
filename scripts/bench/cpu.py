#!/usr/bin/env python3
"""Training on this host's CPU: plans and layouts compared, predictions against measurements.

    scripts/bench/cpu.py --case CASE [options] [-o RESULT.md]        options: --case CASE --help

Stages are processes of one thread (gloo). Documents are the source text of this Python's standard
library, or --data-path. The model has 8 layers, 8 heads in 4 groups, and hidden 512 in the case
pipeline, 256 elsewhere. A size is CONTEXTxDOCUMENTS of a batch. The time is that of the schedule,
from the first op to the last op of any stage, without planning and optimizer.

Plans in turn, for every batch, in one job that first measures its cost model:

    pipeline    elastic pipelines (epp) and packing; the budgets are 100% and 60% of what packing to
                the context holds without recompute on each stage. --lines split: epp also without
                the lever wsplit; --lines 60: the last two alone, best: the two at 100%.
                --stock: Megatron's schedule, too
    models      the same for small models: MODEL:CONTEXTxDOCUMENTS, with models like Qwen3-MoE,
                gpt-oss (window, sinks), Nemotron-H (Mamba-2), Nemotron-3 (MTP; by-time: its layers
                by time) and Qwen3-Next (gated delta nets)
    split       backwards in two halves: epp without and with the lever wsplit, and the plan of the
                former with I and W in place of every B, or with all W at the end
    memory      predictions of plans of many kinds: several planners and budgets, random plans.
                --lines offload: layers in host memory, by plans that assume that copies take no
                time, and by random plans; only bytes are compared

Ways to run one job, --rounds times in changing order, with a cost model that `profile` measures.
Ratios are seconds of the first way over the row's, for the same batch, measured and predicted:

    vocab       a heavy LM head: on the last stage, vocabulary parallelism
    placements  heavy LM head, uneven layers: packing at each batch's best length on layers 6 2 and
                in Megatron's interleaved schedule, one stage on a rank, two (V, interleaved), and
                --epp-placement auto
    chats       a system prompt of 2K tokens before answers of 0.2K to 2K (2.5 times the tokens that
                differ): packing as above, documents whole, and --epp-share-from 512; and the
                time in which prefixes are found
    slow-rank   libraries of rank --rank use SSE 4.2 or AVX2 alone: taken for alike, as measured,
                and as measured with stages by time

External training loops (cpu_loops.py, cpu_trees.py): loops, trees.
"""

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headline import ROOT, abreast, heading, host, markdown, write
from in_turns import (
    AT_END,
    IN_PLACE,
    RANDOM,
    VARIANTS,
    WORK,
    Turns,
    Variant,
    corpus_of,
    entries_told,
    torchrun,
    work,
)

# ------------------------------------------------------------------ models

_OF_8_LAYERS = """
    --num-layers 8 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights
"""
LLAMA = f"{_OF_8_LAYERS} --hidden-size 512 --ffn-hidden-size 1376"
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


@dataclass(frozen=True, slots=True)
class Size:
    model: str
    context: int
    documents: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        found = re.fullmatch(r"(?:([a-z0-9-]+):)?([1-9][0-9]*)x([1-9][0-9]*)", text)
        if found is None or found[1] not in {None, *MODELS}:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected CONTEXTxDOCUMENTS, or MODEL: before it with a model of "
                f"{', '.join(MODELS)}"
            )
        return cls(found[1] or "", int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.model or 'llama'} {self.context / 1024:g}K x {self.documents}"


def flags(size: Size, corpus: Path, iterations: int, dtype: str = "fp32", stages: int = 2) -> list:
    """Return the flags of a training; later flags take the place of the model's."""
    text = f"""{MODELS.get(size.model, LLAMA)}
        --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size {stages}
        --seq-length {size.context} --max-position-embeddings {size.context}
        --global-batch-size {size.documents} --train-iters {iterations} --lr 1e-4
        --split 100,0,0 --eval-iters 0 --log-interval 1 --data-path {corpus}
        --tokenizer-type SentencePieceTokenizer --tokenizer-model {corpus}.model
    """
    return text.split() + (["--bf16"] if dtype == "bf16" else [])


def spread(ratios: Sequence[float], digits: int = 2) -> str:
    """Return the median of ``ratios``, with the least and the largest where they differ."""
    median, *ends = (f"{of(ratios):.{digits}f}" for of in (statistics.median, min, max))
    return median if ends[0] == ends[1] else f"{median} ({ends[0]} to {ends[1]})"


# ------------------------------------------------------------------ plans in turn

SPLIT = (*VARIANTS, Variant("epp", 1.0, split=False), Variant("epp", 0.6, split=False))
_UNSPLIT = Variant("epp", 1.0, split=False)
LINES = {
    "all": VARIANTS,
    "100": VARIANTS[:3],
    "60": VARIANTS[3:],
    "best": VARIANTS[1:3],
    "split": SPLIT,
    "halves": (
        _UNSPLIT,
        *(replace(_UNSPLIT, halves=halves) for halves in (IN_PLACE, AT_END)),
        Variant("epp", 1.0),
    ),
    "kinds": (
        Variant("packing", None),
        *(Variant("epp", share) for share in (1.0, 0.75, 0.5, 0.35)),
        Variant(RANDOM, None),
        Variant("infinipipe", 0.8),
        Variant("seq1f1b", None),
    ),
    "offload": (
        *(Variant("epp", share, offload=True) for share in (0.8, 0.6, 0.4)),
        *(Variant(RANDOM, None, modes=modes) for modes in ("", "o", "kof")),
    ),
}
TURN_HEADERS = [
    *("job", "budget", "planner", "tokens/s", "seconds", "ratio", "predicted", "bubble"),
    *("recomputed", "peak", "chunks", "split", "seconds off", "memory off", "host off", "executor"),
]
TURN_LEGEND = """\
ratio: the seconds of packing-best over this line's, same batch and budget, median and spread
(without packing-best: of the first line). predicted: the same of the cost model's seconds.
recomputed: layers run again whole, of all. peak: the worst stage of the worst batch, measured, over
packing's without recompute (without that line: over what is predicted of it). split: backwards run
as I and W, of all. off: predicted over measured, less one; seconds: median over the batches;
memory, and offloaded layers in host memory: the worst stage of the worst batch. executor: its own
time between ops, neither compute nor waiting, worst stage and iteration."""


def entries_of(size: Size, arguments: argparse.Namespace, corpus: Path, folder: Path) -> list[dict]:
    """Return the entries of all iterations after the warm-up."""
    turns = len(LINES[arguments.lines])
    # An op waits for memory that it touches first: of models, every plan runs twice before.
    warm_up = 2 * turns if size.model else arguments.warm_up
    iterations = warm_up + arguments.batches * turns
    words = flags(size, corpus, iterations, arguments.dtype, arguments.pp)
    words += ["--epp", "--epp-effort", str(arguments.effort), "--epp-placement", "even"]
    if arguments.cost_model:
        words += ["--epp-cost-model", arguments.cost_model]
    program = [str(Path(__file__).resolve()), WORK, arguments.lines]
    program += [str(warm_up), str(arguments.first)]
    log = folder / f"{str(size).replace(' ', '-')}.log"
    return entries_told(torchrun(program, words, log, arguments.pp), iterations)[warm_up:]


def turn_rows(size: Size, variants: Sequence[Variant], entries: Sequence[dict]) -> list[list[str]]:
    turns = Turns(variants, entries)
    return [
        [
            str(size),
            "none" if variant.share_of_peak is None else f"{variant.share_of_peak:.0%}",
            variant.name,
            f"{statistics.median(m['tokens'] / m['seconds'] for m in turns.of(number)):.0f}",
            f"{turns.median(number, 'seconds'):.2f}",
            spread(turns.ratios(number, "seconds")),
            f"{turns.ratio(number, 'predicted'):.2f}",
            f"{turns.median(number, 'bubble'):.0%}",
            f"{turns.median(number, 'recomputed'):.0%}",
            f"{turns.peak_share(number):.0%}",
            f"{turns.median(number, 'chunks'):.0f}",
            f"{turns.median(number, 'split'):.0%}",
            f"{turns.seconds_off(number):+.1%}",
            f"{max(memory_errors(turns.of(number)), key=abs):+.1%}",
            host_error(turns.of(number)),
            f"{max(m['own'] for m in turns.of(number)):.2%}",
        ]
        for number, variant in enumerate(variants)
    ]


def memory_errors(entries: Sequence[dict], where: str = "peaks") -> list[float]:
    """Return predicted / measured peak - 1, for every iteration and stage that holds something."""
    return [
        predicted / held - 1
        for entry in entries
        for predicted, held in zip(entry[f"predicted_{where}"], entry[where], strict=True)
        if held
    ]


def host_error(entries: Sequence[dict]) -> str:
    """Return the worst error of the bytes in host memory; "-" if nothing is offloaded."""
    found = memory_errors(entries, "host")
    return f"{max(found, key=abs):+.1%}" if found else "-"


def errors(entries: Sequence[dict]) -> str:
    """Return one line with the errors of all predictions."""
    seconds = [abs(e["predicted"] / e["seconds"] - 1) for e in entries]
    memory = [abs(error) for error in memory_errors(entries)]
    return (
        f"{len(entries)} iterations: seconds off by {statistics.median(seconds):.1%} in the "
        f"median, {max(seconds):.1%} at worst; memory by {statistics.median(memory):.1%}, "
        f"{max(memory):.1%} at worst."
    )


def stock(arguments: argparse.Namespace, corpus: Path, folder: Path) -> str:
    """Return a line with tokens per second of Megatron's own schedule: context 4096, 32 samples.

    The first iteration warms up.
    """
    words = flags(Size("", 4096, 32), corpus, 2, arguments.dtype, arguments.pp)
    program = [str(Path(__file__).with_name("stock.py"))]
    words += ["--micro-batch-size", "1"]
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


def compare_turns(arguments: argparse.Namespace, corpus: Path, folder: Path) -> None:
    variants, table, every = LINES[arguments.lines], [], []
    for size in arguments.sizes:
        began = time.monotonic()
        entries = entries_of(size, arguments, corpus, folder)
        every += entries
        table += turn_rows(size, variants, entries)
        show(TURN_HEADERS, table, f"{size}: {time.monotonic() - began:.0f} s")
    said = [TURN_LEGEND, "", errors(every)]
    if arguments.stock:
        said.append(stock(arguments, corpus, folder))
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[arguments.dtype]
    at_once = abreast(arguments.pp, dtype)
    publish(
        arguments.output,
        f"{host()}, {arguments.dtype}, {arguments.pp} processes of one thread, which at once do "
        f"{at_once:.2f} times the work of one alone",
        *(TURN_HEADERS, table, said),
    )


# ------------------------------------------------------------------ ways to run one job

WARM_UP = 1
_CHOSEN = re.compile(r"--epp-placement auto: (.*)")
Ways = Mapping[str, Sequence[str]]
ONE_STAGE, AUTO = ("--epp-placement", "even"), ("--epp-placement", "auto")
# Megatron's interleaved schedule, with the best pack length of each batch.
STOCK_INTERLEAVED = (
    *("--epp-planner", "packing-best", "--epp-placement", "interleaved 2"),
    *("--epp-vocab-parallel", "off"),
)
LEAST = 512
SHARING = f"--epp-share-from {LEAST}"
WAYS: dict[str, Ways] = {
    "vocab": {
        "LM head on the last stage": ("--epp-vocab-parallel", "off", *ONE_STAGE),
        "vocabulary parallelism": ("--epp-vocab-parallel", "on", *ONE_STAGE),
    },
    "placements": {
        "packing at its best length": (
            *("--epp-planner", "packing-best", *AUTO),
            *("--decoder-first-pipeline-num-layers", "6"),
            *("--decoder-last-pipeline-num-layers", "2"),
        ),
        "packing, interleaved 2": STOCK_INTERLEAVED,
        "one stage a rank": ONE_STAGE,
        "v": ("--epp-placement", "v"),
        "interleaved 2": ("--epp-placement", "interleaved 2"),
        "auto": AUTO,
    },
    "chats": {
        "packing at its best length": ("--epp-planner", "packing-best"),
        "packing, interleaved 2": STOCK_INTERLEAVED,
        "whole documents": AUTO,
        SHARING: (*AUTO, "--epp-share-from", str(LEAST)),
    },
}
# The last quarter of the layers has full attention.
UNEVEN = ("--window-size", "127,0", "--window-attn-skip-freq", "[1,1,1,1,1,1,0,0]")


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration; ``promised`` and ``held`` are predicted and measured peak bytes by rank."""

    layers: tuple[int, ...]
    seconds: float
    predicted: float
    promised: tuple[float, ...]
    held: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path, number: int) -> "Iteration":
        """Return iteration ``number`` from the files that --epp-record wrote."""
        from megatron_epp.ir import Step
        from megatron_epp.ir.timed import parse_records

        name = f"iteration-{number:06d}"
        (plan,) = Step.parse((folder / f"{name}.step").read_text()).plans
        records = parse_records((folder / f"{name}.replica-0.timed").read_text())
        place = plan.rank_of
        return cls(
            plan.layers,
            max(record.stop for record in records) - min(record.start for record in records),
            plan.predicted.seconds,
            tuple(peak * 2**30 for peak in plan.predicted.peak_gib),
            tuple(
                max(r.peak_bytes for r in records if place[r.stage] == rank)
                for rank in range(plan.ranks)
            ),
        )


def measured_costs(words: list[str], folder: Path) -> list[str]:
    """Return the flag for the cost model that ``profile`` measures with flags ``words``."""
    file = str(folder / "cost.json")
    command = [sys.executable, "-m", "megatron_epp", "profile", "--pp", "2", *words, "-o", file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"profile failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ["--epp-cost-model", file]


def run(words: list[str], batches: int, folder: Path) -> tuple[list[Iteration], str]:
    """Return the iterations after the warm-up, and the log text on automatic choices."""
    folder.mkdir()
    how = [*words, "--epp", "--epp-record", str(folder)]
    text = torchrun(["-m", "megatron_epp.pretrain_gpt"], how, folder / "log")
    said = _CHOSEN.search(text)
    numbers = range(WARM_UP + 1, WARM_UP + batches + 1)
    return [Iteration.read(folder, number) for number in numbers], said[1] if said else ""


WAY_HEADERS = [
    *("job", "way", "layers", "seconds", "ratio", "predicted", "seconds off"),
    *("held, by rank", "memory off, by rank"),
]


def way_rows(size: Size, rounds: list[dict[str, list[Iteration]]]) -> list[list[str]]:
    """Return one table row per way, with ratios to the first."""
    made = []
    first = next(iter(rounds[0]))
    for way in rounds[0]:
        mine = [one for found in rounds for one in found[way]]
        pairs = list(zip([one for found in rounds for one in found[first]], mine, strict=True))
        held = [max(each) for each in zip(*(one.held for one in mine), strict=True)]
        off = [
            statistics.median(one.promised[rank] / one.held[rank] for one in mine) - 1
            for rank in range(len(held))
        ]
        made.append(
            [
                str(size),
                way,
                " ".join(map(str, mine[0].layers)),
                f"{statistics.median(one.seconds for one in mine):.2f}",
                spread([b.seconds / m.seconds for b, m in pairs], 3),
                f"{statistics.median(b.predicted / m.predicted for b, m in pairs):.3f}",
                f"{statistics.median(one.predicted / one.seconds for one in mine) - 1:+.1%}",
                " ".join(f"{peak / 2**20:.0f}" for peak in held) + " MiB",
                " ".join(f"{share:+.1%}" for share in off),
            ]
        )
    return made


PROMPT, ANSWERS, CHATS, TOKENS = 2048, (200, 2048), 256, 1000
FOUND = 16  # batches whose prefixes are found


def chats(prefix: Path) -> Path:
    """Write random chats after one system prompt, with a loss on the answers; return ``prefix``."""
    import megatron_epp

    megatron_epp.prepare_host()
    import numpy

    from megatron_epp.mcore.data.conversations import write_encoded

    random = numpy.random.default_rng(0)
    prompt = random.integers(0, TOKENS, PROMPT)

    def chat(length: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        tokens = numpy.concatenate((prompt, random.integers(0, TOKENS, length)))
        return tokens, (numpy.arange(len(tokens)) >= PROMPT).astype(numpy.uint8)

    lengths = random.integers(*ANSWERS, CHATS)
    write_encoded(([chat(length)] for length in lengths), prefix, TOKENS, prefix)
    return prefix


def finding(size: Size, corpus: Path, seconds: float) -> str:
    """Return a line on the CPU time in which prefixes of a batch are found, of an iteration's."""
    from megatron_epp.mcore.data.global_batches import GlobalBatches
    from megatron_epp.mcore.data.shared_tokens import SharedTokens

    sys.path.insert(0, str(ROOT))
    from tests.cli.training import documents_of

    documents = documents_of([corpus], None, size.context)
    batches = GlobalBatches(documents, size.documents, 0)
    drawn = [next(batches) for _ in range(FOUND)]
    shared, began = SharedTokens(LEAST), time.process_time()
    forests = [shared.forest(documents, batch) for batch in drawn]
    taken = (time.process_time() - began) / FOUND
    repeated = statistics.mean(1 - forest.tokens / sum(forest.lengths) for forest in forests)
    return (
        f"- {size}: prefixes of a batch, {repeated:.0%} of its tokens, are found in "
        f"{taken * 1e3:.1f} ms of CPU time, {taken / seconds:.2%} of an iteration (bound 5%)"
    )


def compare_ways(arguments: argparse.Namespace, corpus: Path, folder: Path) -> None:
    table: list[list[str]] = []
    said = []
    slow = arguments.case == "slow-rank"
    if slow:
        variables = dict(zip(VARIABLES, INSTRUCTIONS[arguments.instructions], strict=True))
        said.append(alone(variables))
        slow_down(arguments.rank, variables, folder / "slowed")
    for size in arguments.sizes:
        place = folder / str(size).replace(" ", "-")
        place.mkdir()
        words = flags(size, corpus, WARM_UP + arguments.batches, arguments.dtype)
        if arguments.case == "chats":
            words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(TOKENS)]
        words += ["--make-vocab-size-divisible-by", str(arguments.words)]
        words += ["--hidden-size", str(arguments.hidden)]
        words += ["--ffn-hidden-size", str(arguments.hidden * 11 // 4)]
        words += UNEVEN if arguments.case == "placements" else ()
        costs = measured_costs(words, place)
        words += ["--epp-planner", arguments.planner, *costs, "--epp-placement", "even"]
        ways = slow_ways(Path(costs[-1]), said) if slow else WAYS[arguments.case]
        if unknown := set(arguments.ways or ()) - set(ways):
            raise SystemExit(f"--ways {min(unknown)!r}: expected some of {', '.join(ways)}")
        ways = {way: ways[way] for way in arguments.ways or ways}
        rounds = []
        for number in range(arguments.rounds):
            # In changing order: a host's slow changes fall on all ways.
            found = {}
            for way in ways if number % 2 == 0 else reversed(ways):
                at = place / f"{number}-{way.replace(' ', '-')}"
                found[way], choice = run([*words, *ways[way]], arguments.batches, at)
                if choice and number == 0:
                    said.append(f"- {size}, {way}: {choice.replace(str(place), '')}")
            rounds.append({way: found[way] for way in ways})
        if arguments.case == "chats" and SHARING in ways:
            ran = (one.seconds for found in rounds for one in found[SHARING])
            said.append(finding(size, corpus, statistics.median(ran)))
        table += way_rows(size, rounds)
        show(WAY_HEADERS, table)
    sizes = f"hidden {arguments.hidden}, vocabulary {arguments.words}, {arguments.planner}"
    slower = f", rank {arguments.rank} with {arguments.instructions} alone" if slow else ""
    publish(
        arguments.output,
        f"{host()}, {arguments.dtype}, {sizes}, two processes of one thread{slower}",
        *(WAY_HEADERS, table, said),
    )


# ------------------------------------------------------------------ a slow rank

# Instructions that MKL, oneDNN and torch may use.
INSTRUCTIONS = {"sse": ("SSE4_2", "SSE41", "default"), "avx2": ("AVX2", "AVX2", "avx2")}
VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
SLOWED = """
import os
if os.environ.get("RANK") == {rank!r}:
    os.environ.update({variables!r})
"""
ALONE = """
import time, torch
torch.set_num_threads(1)
x, w, q = torch.randn(1024, 512), torch.randn(512, 1376), torch.randn(1, 8, 1024, 64)
def seconds(work):
    times = []
    for _ in range(9):
        began = time.thread_time()
        for _ in range(8): work()
        times.append(time.thread_time() - began)
    return sorted(times)[4]
attend = torch.nn.functional.scaled_dot_product_attention
print(seconds(lambda: x @ w), seconds(lambda: attend(q, q, q, is_causal=True)))
"""


def slow_down(rank: int, variables: dict[str, str], folder: Path) -> None:
    """Slow down all Python processes of ``rank`` that start after this call."""
    folder.mkdir()
    text = SLOWED.format(rank=str(rank), variables=variables)
    (folder / "sitecustomize.py").write_text(text)
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *before])


def alone(variables: dict[str, str]) -> str:
    """Return a line on how much longer a product and attention take with ``variables``."""
    both = []
    for more in ({}, variables):
        words = [sys.executable, "-c", ALONE]
        text = subprocess.run(
            words, env={**os.environ, **more}, capture_output=True, text=True, check=True
        ).stdout
        both.append([float(word) for word in text.split()])
    product, attention = (slow / fast for fast, slow in zip(*both, strict=True))
    return f"- alone a product takes {product:.2f}, attention {attention:.2f} times as long there"


def slow_ways(file: Path, said: list[str]) -> Ways:
    """Return the flags of every way; ``said`` gets a line on the ranks in cost model ``file``."""
    text = json.loads(file.read_text())
    factors = ", ".join(f"{factor:.2f}" for factor in text["rank_slowness"])
    measured = f"ranks take {factors} times as long as the fastest" if factors else "equal ranks"
    said.append(f"- `profile`: {measured}")
    alike = file.with_name("alike.json")
    alike.write_text(json.dumps({**text, "rank_slowness": []}))
    return {
        "taken for alike": [*ONE_STAGE, "--epp-cost-model", str(alike)],
        "as measured": ONE_STAGE,
        "as measured, auto": AUTO,
    }


# ------------------------------------------------------------------ the command line

TURNS = {
    "pipeline": ["4096x32", "16384x32", "32768x32", "16384x8", "16384x128"],
    "models": [f"{model}:{size}" for size in ("16384x6", "8192x8", "32768x4")
               for model in ("qwen3-moe", "gpt-oss")],
    "split": ["4096x8", "16384x8"],
    "memory": ["16384x4"],
}  # fmt: skip
WAY_SIZES = {"vocab": ["4096x6"], "placements": ["2048x4"], "slow-rank": ["2048x4"]}
WAY_SIZES |= {"chats": ["4096x16"]}
LINES_OF = {"split": "halves", "memory": "kinds"}
OTHERS = {"loops": "cpu_loops", "trees": "cpu_trees"}


def show(headers: list[str], table: list[list[str]], *said: str) -> None:
    from megatron_epp.show.table import text_table

    print(*said, text_table(headers, table), sep="\n", flush=True)


def publish(
    output: str | None, hardware: str, headers: list[str], table: list[list[str]], said: list[str]
) -> None:
    """Print the table and the lines below it, and append them to the file ``output``."""

    show(headers, table)
    print(*said, hardware, sep="\n")
    below = "\n".join(said)
    write(output, f"{heading(hardware)}{markdown(headers, table)}\n{below}\n\n")


def parse() -> argparse.Namespace:
    cases = [*TURNS, *WAY_SIZES]
    case = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    case.add_argument("--case", required=True, choices=[*cases, *OTHERS])
    if {"-h", "--help"} & set(sys.argv) and "--case" not in sys.argv:
        print(__doc__)
        raise SystemExit
    named, words = case.parse_known_args()
    if named.case in OTHERS:
        sys.argv[1:] = words
        importlib.import_module(OTHERS[named.case]).main()
        raise SystemExit
    turns = named.case in TURNS
    parser = argparse.ArgumentParser(description=f"cpu.py --case {named.case}", parents=[case])
    sizes = (TURNS | WAY_SIZES)[named.case]
    parser.add_argument("--sizes", nargs="+", type=Size.parse, default=[*map(Size.parse, sizes)],
                        metavar="CxN", help=f"default: {' '.join(sizes)}")  # fmt: skip
    parser.add_argument("--batches", type=int, default=2 if named.case == "models" else 3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    if turns:
        parser.add_argument("--first", type=int, default=0, help="number of the first batch")
        parser.add_argument(
            "--warm-up", type=int, choices=(0, 1), default=1, help="0: for long sizes of pipeline"
        )
        parser.add_argument("--pp", type=int, choices=(2, 4), default=2, help="stages")
        parser.add_argument("--effort", type=int, default=4)
        parser.add_argument("--cost-model", metavar="FILE", help="instead of measuring at start")
        parser.add_argument("--lines", choices=LINES, default=LINES_OF.get(named.case, "all"))
        parser.add_argument("--stock", action="store_true", help="Megatron's own schedule, at 4K")
    else:
        parser.add_argument("--rounds", type=int, default=2, help="runs each way")
        parser.add_argument("--ways", nargs="+", metavar="WAY", help="only these, by their names")
        parser.add_argument("--planner", default="epp", help="epp, packing, adaptis, ...")
        words, hidden = {"slow-rank": (128, 512), "chats": (128, 128)}.get(named.case, (16384, 256))
        parser.add_argument("--words", type=int, default=words, help="the vocabulary, padded")
        parser.add_argument("--hidden", type=int, default=hidden)
        parser.add_argument("--instructions", choices=INSTRUCTIONS, default="sse")
        parser.add_argument("--rank", type=int, default=1, choices=(0, 1))
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    folder = Path(tempfile.mkdtemp(prefix=f"cpu-{arguments.case}-"))
    compare = compare_turns if arguments.case in TURNS else compare_ways
    own = arguments.case == "chats" and not arguments.data_path
    corpus = chats(folder / "chats") if own else corpus_of(arguments, folder)
    compare(arguments, corpus, folder)


if __name__ == "__main__":
    if WORK not in sys.argv:
        main()
    else:
        at = sys.argv.index(WORK)
        lines, warm_up, first = sys.argv[at + 1 : at + 4]
        del sys.argv[at : at + 4]
        work(LINES[lines], int(warm_up), int(first))
