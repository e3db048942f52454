#!/usr/bin/env python3
"""Two stages on each of two ranks, compared with the best partition of one stage each, on a CPU.

    scripts/bench/cpu_placements.py [--cases 2048x4] [--planner epp] [--rounds N] [-o RESULT.md]

The model has a heavy LM head and uneven layers (gloo, one core per rank): 8 layers, hidden 256. The
last quarter of the layers has full attention, the others a window of 127 earlier keys. With --words
vocabulary entries, the LM head takes as long as several layers. A batch has 4 real documents. The
same run is timed with one stage per rank and layers balanced by time (--epp-partition auto, the
baseline); with two stages per rank, as a V and interleaved, with equal numbers of layers per stage;
and with --epp-placement auto, which chooses one of these with layers balanced by time. All runs
plan with the cost model that `profile` measures first. Placements run --rounds times in changing
order. The table has medians over iterations; the ratio is the baseline's seconds divided by those
of the row, for the same batch, as measured and as the executed plans predict.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cpu_pipeline import flags
from cpu_vocab import WARM_UP, Iteration, iteration
from headline import heading, host, write
from in_turns import corpus_of, torchrun

BEST = "layers by time"
WAYS = {
    BEST: ("--epp-partition", "auto"),
    "v": ("--epp-placement", "v"),
    "interleaved 2": ("--epp-placement", "interleaved 2"),
    "auto": ("--epp-placement", "auto"),
}
_CHOSEN = re.compile(r"--epp-(?:partition|placement) auto: (.*)")


def job(case: str, arguments: argparse.Namespace, corpus: Path) -> list[str]:
    """Return the flags of a run, which are the same for all placements."""
    context, batch = map(int, case.split("x"))
    words = flags(corpus, context, batch, WARM_UP + arguments.batches, "fp32")
    words += ["--make-vocab-size-divisible-by", str(arguments.words)]
    words += ["--hidden-size", str(arguments.hidden)]
    words += ["--ffn-hidden-size", str(arguments.hidden * 11 // 4)]
    return [*words, "--window-size", "127,0", "--window-attn-skip-freq", "[1,1,1,1,1,1,0,0]"]


def measured_costs(words: list[str], folder: Path) -> list[str]:
    """Return the flag for the cost model that ``profile`` measures with flags ``words``."""
    file = str(folder / "cost.json")
    command = [sys.executable, "-m", "megatron_epp", "profile", "--pp", "2", *words, "-o", file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"profile failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ["--epp-cost-model", file]


def run(
    words: list[str], way: Sequence[str], batches: int, folder: Path
) -> tuple[list[Iteration], str]:
    """Return the iterations after the warm-up, and the log text on automatic choices."""
    folder.mkdir()
    how = ["--epp", *way, "--epp-vocab-parallel", "off", "--epp-record", str(folder)]
    text = torchrun(["-m", "megatron_epp.pretrain_gpt"], [*words, *how], folder / "log")
    said = _CHOSEN.search(text)
    numbers = range(WARM_UP + 1, WARM_UP + batches + 1)
    return [iteration(folder, number) for number in numbers], said[1] if said else ""


HEADERS = [
    *("context", "documents", "stages", "layers", "seconds", "ratio", "predicted"),
    "predicted off by",
]


def rows(case: str, rounds: list[dict[str, list[Iteration]]], best_way: str) -> list[list[str]]:
    """Return one table row per way, with ratios to ``best_way``."""
    context, batch = case.split("x")
    made = []
    for way in rounds[0]:
        mine = [one for found in rounds for one in found[way]]
        best = [one for found in rounds for one in found[best_way]]
        pairs = list(zip(best, mine, strict=True))
        made.append(
            [
                f"{int(context) / 1024:g}K",
                batch,
                way,
                " ".join(map(str, mine[0].layers)),
                f"{statistics.median(one.seconds for one in mine):.2f}",
                f"{statistics.median(b.seconds / m.seconds for b, m in pairs):.3f}",
                f"{statistics.median(b.predicted / m.predicted for b, m in pairs):.3f}",
                f"{statistics.median(one.predicted / one.seconds for one in mine) - 1:+.1%}",
            ]
        )
    return made


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=("2048x4",), metavar="CxN")
    parser.add_argument("--rounds", type=int, default=2, help="runs each way")
    parser.add_argument("--batches", type=int, default=3, help="iterations of a run that count")
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")


def in_rounds(
    arguments: argparse.Namespace,
    ways_of: Callable[[str, Path], tuple[list[str], Mapping[str, Sequence[str]]]],
    best: str,
    folder: Path,
    said: list[str],
    settings: str,
) -> None:
    """Run every case in every way, and print and append a table with the lines ``said`` below it.

    Args:
        arguments: options of the script.
        ways_of: function from (case, its folder) to the flags of the case, and of every way.
        best: way to which ratios refer.
        folder: folder of the runs.
        said: lines below the table; automatic choices are appended.
        settings: text in the heading, after the host.
    """
    from megatron_epp.show.table import markdown, text_table

    table: list[list[str]] = []
    for case in arguments.cases:
        place = folder / case
        place.mkdir()
        words, ways = ways_of(case, place)
        rounds = []
        for number in range(arguments.rounds):
            # In changing order: what a host does by and by falls on all.
            found = {}
            for way in ways if number % 2 == 0 else reversed(ways):
                at = place / f"{number}-{way.replace(' ', '-')}"
                found[way], choice = run(words, ways[way], arguments.batches, at)
                if choice and number == 0:
                    said.append(f"- {case}, {way}: {choice.replace(str(place), '')}")
            rounds.append(found)
        table += rows(case, rounds, best)
        print(text_table(HEADERS, table), *said, sep="\n", flush=True)
    text = "\n".join([markdown(HEADERS, table), *said])
    write(arguments.output, f"{heading(f'{host()}, float32, {settings}')}{text}\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    parser.add_argument("--planner", default="epp", help="epp, packing, adaptis, ...")
    parser.add_argument("--words", type=int, default=16384, help="the vocabulary, padded")
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cpu_placements-"))
    corpus = corpus_of(arguments, folder)

    def ways_of(case: str, place: Path) -> tuple[list[str], Mapping[str, Sequence[str]]]:
        words = job(case, arguments, corpus)
        return [*words, *measured_costs(words, place), "--epp-planner", arguments.planner], WAYS

    sizes = f"hidden {arguments.hidden}, {arguments.words} words, planner {arguments.planner}"
    in_rounds(arguments, ways_of, BEST, folder, [], f"{sizes}, two processes of one thread")


if __name__ == "__main__":
    main()
