#!/usr/bin/env python3
"""Vocabulary parallelism over two stages, compared with the LM head on the last stage, on a CPU.

    scripts/bench/cpu_vocab.py [--cases 4096x6] [--words 16384] [--rounds N] [-o RESULT.md]

The job is that of cpu_pipeline.py (gloo, one core each): 8 layers, real documents, and a vocabulary
padded to ``--words``. 16384 entries at hidden 256 make the LM head as expensive as five layers. The
same run is timed with equal numbers of layers per stage, with --epp-vocab-parallel on, and with
--epp-partition auto, ``--rounds`` times in changing order. Each run measures its own cost model and
plans with it. The table has medians of seconds over iterations, the largest peaks, and the errors
of predictions by stage.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cpu_pipeline import flags
from headline import heading, host, write
from in_turns import corpus_of, torchrun

EVEN = "even layers"
WAYS = {
    EVEN: (),
    "output layer over stages": ("--epp-vocab-parallel", "on"),
    "layers by time": ("--epp-partition", "auto"),
}
WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration; ``promised`` and ``held`` are predicted and measured peak bytes by stage."""

    layers: tuple[int, ...]
    seconds: float
    predicted: float
    promised: tuple[float, ...]
    held: tuple[int, ...]


def run(case: str, way: str, arguments: argparse.Namespace, corpus: Path, folder: Path) -> list:
    context, batch = map(int, case.split("x"))
    count = WARM_UP + arguments.batches
    words = flags(corpus, context, batch, count, arguments.dtype)
    words += ["--make-vocab-size-divisible-by", str(arguments.words)]
    words += ["--hidden-size", str(arguments.hidden)]
    words += ["--ffn-hidden-size", str(arguments.hidden * 11 // 4)]
    words += ["--epp", *WAYS[way], "--epp-record", str(folder)]
    torchrun(["-m", "megatron_epp.pretrain_gpt"], words, folder / "log")
    return [iteration(folder, number) for number in range(WARM_UP + 1, count + 1)]


def iteration(folder: Path, number: int) -> Iteration:
    """Return iteration ``number`` from the files that --epp-record wrote."""
    from megatron_epp.ir import Step
    from megatron_epp.ir.timed import parse_records

    name = f"iteration-{number:06d}"
    (plan,) = Step.parse((folder / f"{name}.step").read_text()).plans
    records = parse_records((folder / f"{name}.replica-0.timed").read_text())
    stages = range(plan.stages)
    return Iteration(
        plan.layers,
        max(record.stop for record in records) - min(record.start for record in records),
        plan.predicted.seconds,
        tuple(peak * 2**30 for peak in plan.predicted.peak_gib),
        tuple(max(r.peak_bytes for r in records if r.stage == stage) for stage in stages),
    )


HEADERS = [
    *("context", "documents", "layers", "", "seconds", "against even layers", "predicted off by"),
    *("held, by stage", "predicted off by, by stage"),
]


def rows(case: str, rounds: list[dict[str, list[Iteration]]]) -> list[list[str]]:
    context, batch = case.split("x")
    made = []
    for way in WAYS:
        mine = [one for found in rounds for one in found[way]]
        ratios = [
            one.seconds / other.seconds
            for found in rounds
            for one, other in zip(found[way], found[EVEN], strict=True)
        ]
        held = [max(each) for each in zip(*(one.held for one in mine), strict=True)]
        by_stage = zip(*((one.promised, one.held) for one in mine), strict=True)
        promised, really = (list(zip(*each, strict=True)) for each in by_stage)
        off = [
            statistics.median(p / h for p, h in zip(*pair, strict=True)) - 1
            for pair in zip(promised, really, strict=True)
        ]
        made.append(
            [
                f"{int(context) // 1024}K",
                batch,
                " ".join(map(str, mine[0].layers)),
                way,
                f"{statistics.median(one.seconds for one in mine):.2f}",
                f"{statistics.median(ratios):.3f}",
                f"{statistics.median(one.predicted / one.seconds for one in mine) - 1:+.1%}",
                " ".join(f"{peak / 2**20:.0f}" for peak in held) + " MiB",
                " ".join(f"{share:+.1%}" for share in off),
            ]
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=("4096x6",), metavar="CxN")
    parser.add_argument("--words", type=int, default=16384, help="the vocabulary, padded")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="runs each way")
    parser.add_argument("--batches", type=int, default=3, help="iterations of a run that count")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    arguments = parser.parse_args()

    from megatron_epp.show.table import markdown, text_table

    folder = Path(tempfile.mkdtemp(prefix="cpu_vocab-"))
    corpus = corpus_of(arguments, folder)
    table = []
    for case in arguments.cases:
        rounds = []
        for number in range(arguments.rounds):
            # In changing order: what a host does by and by falls on both.
            found = {}
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                place = folder / f"{case}-{number}-{way.replace(' ', '-')}"
                place.mkdir()
                found[way] = run(case, way, arguments, corpus, place)
            rounds.append(found)
        table += rows(case, rounds)
        print(text_table(HEADERS, table), flush=True)
    sizes = f"hidden {arguments.hidden}, {arguments.words} words"
    hardware = f"{host()}, {arguments.dtype}, {sizes}, two processes of one thread"
    write(arguments.output, f"{heading(hardware)}{markdown(HEADERS, table)}\n")


if __name__ == "__main__":
    main()
