"""Placement, partition and schedule together, against interleaved 1F1B and each alone (simulated).

    python scripts/bench/placements.py [--models gemma3-27b deepseek-v3 nemotron-h-8b]
                                       [--ranks 8 16] [--batches 2] [-o RESULT.md]

AdaPtis (arXiv 2509.23722) reports a speedup over interleaved 1F1B of 1.42 on average, and 2.14 at
most, for models of these shapes. Here its schedule and those of this project run on the cost model
of megatron_epp.cost; nothing ran on a GPU. The setting of AdaPtis has documents of equal length, in
the number given for each rank; the `wlb` documents are an addition of this project.
"""

import argparse
import io
import sys
from collections.abc import Sequence

from headline import ROOT, heading, host, write

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import EVENLY, named_placement
from megatron_epp.planner import Options, planner_of
from megatron_epp.planner.choose.choice import PLACEMENT_NAMES, run_choice, with_placement

K = 1024
DEVICE = "h200-141g"
REPLICAS = 8  # over which the optimizer is spread
HEAD = ("model", "ranks", "documents", "1f1b interleaved 2", "1f1b, layers by time / it",
        "adaptis, one stage a rank / it", "adaptis / it", "its placement", "epp / it",
        "its placement")  # fmt: skip


def seconds(planner: str, cost: Cost, batches: Sequence[Sequence[int]], options: Options) -> float:
    """Return the total seconds of all batches; infinite if a plan does not fit in memory."""
    found = [planner_of(planner)(lengths, cost, options) for lengths in batches]
    return sum(each.seconds for each in found) if all(each.fits for each in found) else float("inf")


def by_time(planner: str, cost: Cost, batches: Sequence[Sequence[int]], options: Options) -> Cost:
    return run_choice(cost, batches, options, planner, placements=(EVENLY,)).cost


def row(name: str, ranks: int, said: str, batches: Sequence[Sequence[int]], how: Options) -> str:
    """Return the table row of one model on ``ranks`` pipeline ranks of eight devices.

    Cells are speedups over interleaved 1F1B with equal numbers of layers.
    """
    even = named_cost(name, DEVICE, pp=ranks, tp=8, dp=REPLICAS)
    every = [list(lengths) * REPLICAS for lengths in batches]  # to choose by
    dealt = named_placement("interleaved 2", ranks)
    assert dealt is not None
    base = seconds("1f1b", with_placement(even, dealt), batches, how)
    cells = [f"{base / len(batches):.3g} s"]
    for planner in ("1f1b", "adaptis"):
        alone = seconds(planner, by_time(planner, even, every, how), batches, how)
        cells.append(f"{base / alone:.2f}")
    for planner in ("adaptis", "epp"):
        found = run_choice(even, every, how, planner, placements=PLACEMENT_NAMES)
        ratio = base / seconds(planner, found.cost, batches, how)
        cells += [f"{ratio:.2f}", found.way.placement]
    return f"| {name} | {ranks} | {said} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    known = ["gemma3-27b", "deepseek-v3", "nemotron-h-8b"]
    parser.add_argument("--models", nargs="*", default=known)
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--documents", type=int, default=2, help="equal ones, for each rank")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    args = parser.parse_args()
    text = io.StringIO()
    if args.models:
        print("All times are simulated: times as fast as interleaved 1F1B on even layers. "
              f"{DEVICE}, TP 8, {args.batches} batches of one replica.\n", file=text)  # fmt: skip
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", file=text)
    for name in args.models:
        for ranks in args.ranks:
            equal = [[4 * K] * (args.documents * ranks)]
            corpus = open_corpus("wlb", 32 * K)
            ours = [corpus.batch(number, 64) for number in range(args.batches)]
            for said, batches, context in (
                (f"{len(equal[0])} of 4K", equal, 4 * K),
                ("64 of wlb, 32K", ours, 32 * K),
            ):
                print(name, ranks, said, file=sys.stderr, flush=True)
                print(row(name, ranks, said, batches, Options(context, effort=2)), file=text)
    print(text.getvalue())
    write(args.output, heading(f"{host()}, one of them used") + text.getvalue())


if __name__ == "__main__":
    main()
