"""Planners compared on models with layers of several kinds (simulated).

    python scripts/bench/models.py [--models qwen3-30b-a3b deepseek-v3 gpt-oss-120b]
                                   [--lengths wlb] [--context 131072] [--documents 128]
                                   [--batches 3] [--first 30] [-o RESULT.md]

All numbers are simulated with the cost model of megatron_epp.cost, from the models' shapes and
assumed rates of an H100; nothing ran on a GPU. ``documents`` is the number for one replica. Stages
have equal numbers of layers.
"""

import argparse
import io
import statistics
import sys
import time
from collections.abc import Sequence

from headline import ROOT, publish

sys.path.insert(0, str(ROOT))

from device_groups import planned

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import format_kinds
from megatron_epp.ir import PlanError
from megatron_epp.planner.options import ALL, Options
from megatron_epp.planner.registry import PLANNERS

DEVICE = "h100-80g"
# Pipeline stages of eight devices (TP 8, and as many for the experts), and replicas, over which
# the optimizer is spread.
LAYOUTS = {
    "qwen3-30b-a3b": (4, 1),
    "deepseek-v3": (16, 8),
    "gpt-oss-120b": (4, 4),
    "nemotron-h-8b": (4, 1),
    "qwen3-next-80b": (4, 1),
}
OTHERS = ("packing-best", "infinipipe", "megatron-hybrid-cp")
HEAD = ("model", "seconds", *(f"{name} / epp" for name in OTHERS), "idle", "recompute",
        "exchanges", "GiB", "planned in")  # fmt: skip


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return the median (minimum .. maximum) as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    if not len(values) > 1:
        return form.format(middle)
    return f"{form.format(middle)} ({form.format(low)}..{form.format(high)})"


def row(name: str, cost: Cost, batches: Sequence[tuple[int, ...]], context: int) -> list[str]:
    """Return the table row of one model."""
    options = Options(context=context, levers=ALL)
    ours, times = [], []
    for batch in batches:
        began = time.process_time()
        ours.append(PLANNERS["epp"](batch, cost, options))
        times.append(time.process_time() - began)
    assert len(ours) == len(batches)
    against = []
    for other in OTHERS:
        try:
            found = [planned(other, batch, cost, options) for batch in batches]
            ratios = [f.seconds / o.seconds for f, o in zip(found, ours, strict=True)]
            fits = "" if all(each.fits for each in found) else ", over the budget"
            against.append(spread(ratios) + fits)
        except PlanError:
            against.append("does not fit")
    return [
        name,
        spread([each.seconds for each in ours]),
        *against,
        spread([100 * each.bubble_ratio for each in ours], "{:.0f}%"),
        spread([100 * each.recompute_ratio for each in ours], "{:.1f}%"),
        spread([100 * each.comm_ratio for each in ours], "{:.0f}%"),
        f"{max(max(each.peak_bytes) for each in ours) / 2**30:.0f}",
        spread(times, "{:.1f} s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--lengths", nargs="+", default=["wlb"])
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--first", type=int, default=30)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    args = parser.parse_args()
    text = io.StringIO()
    print("All times are simulated. Medians over the batches, (least..most) behind.\n", file=text)
    for lengths in args.lengths:
        corpus = open_corpus(lengths, args.context)
        numbers = range(args.first, args.first + args.batches)
        batches = [corpus.batch(number, args.documents) for number in numbers]
        print(f"### {lengths}, context {args.context // 1024}K, {args.documents} documents a "
              f"replica, {args.batches} batches, {DEVICE}\n", file=text)  # fmt: skip
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", file=text)
        for name in args.models:
            pp, dp = LAYOUTS[name]
            cost = named_cost(name, DEVICE, pp=pp, tp=8, dp=dp)
            print(name, file=sys.stderr, flush=True)
            said = f"{name}, pp {pp} tp 8 ep {cost.layout.ep} dp {dp}"
            print(f"| {' | '.join(row(said, cost, batches, args.context))} |", file=text)
        print(file=text)
    kinds = "; ".join(f"{name}: {format_kinds(MODELS[name].layer_kinds)}" for name in args.models)
    print(f"Layers: {kinds}.\n", file=text)
    publish(text.getvalue(), args.output)


if __name__ == "__main__":
    main()
