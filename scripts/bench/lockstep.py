"""Cost of lockstep: replicas that share a layer's experts, compared with independent replicas.

    python scripts/bench/lockstep.py [--models qwen3-30b-a3b gpt-oss-120b] [--blocks 2 4]
                                     [--planners epp infinipipe packing] [--lengths wlb]
                                     [--context 131072] [--documents 512] [--batches 3]
                                     [--first 30] [-o RESULT.md]

All numbers are simulated with the cost model of megatron_epp.cost, from the models' shapes and
assumed rates of an H100; nothing ran on a GPU. Both sides have the same time for every op,
including exchanges over the same number of devices, so the ratio is the cost of lockstep alone:
unequal chunks at the same position, documents that must be in flight together, and empty chunks.
``documents`` is the number for all replicas, which form one lockstep group.
"""

import argparse
import io
import statistics
import sys
from collections.abc import Sequence

from headline import ROOT, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import check_op_templates
from megatron_epp.planner import COMPARED, Options, PlannedStep, plan_step

DEVICE = "h100-80g"
STAGES = {"qwen3-30b-a3b": 4, "gpt-oss-120b": 4, "deepseek-v3": 16}
HEAD = ("model", "replicas", "planner", "free", "in lockstep", "price", "empty chunks",
        "recompute, free", "in lockstep", "planned in")  # fmt: skip


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Return the median (minimum .. maximum) as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    if not len(values) > 1:
        return form.format(middle)
    return f"{form.format(middle)} ({form.format(low)}..{form.format(high)})"


def row(
    name: str, width: int, planner: str, batches: Sequence[tuple[int, ...]], context: int
) -> list[str]:
    """Return the table row of one model, size of lockstep group and planner."""
    cost = named_cost(name, DEVICE, pp=STAGES[name], tp=8, dp=width, ep=8 * width)
    free: list[PlannedStep] = []
    locked: list[PlannedStep] = []
    for batch in batches:
        free.append(plan_step(batch, cost, Options(context), planner, width))
        locked.append(plan_step(batch, cost, Options(context, lockstep=width), planner, width))
        check_op_templates(locked[-1].step)
        assert locked[-1].step.lockstep == width
        assert all(found.fits for step in (free[-1], locked[-1]) for found in step.planned)
    chunks = [[chunk for p in step.step.plans for chunk in p.chunks] for step in locked]
    empty = [100 * sum(not c.spans for c in each) / len(each) for each in chunks]
    recompute = [
        spread([100 * max(p.recompute_ratio for p in step.planned) for step in steps], "{:.1f}%")
        for steps in (free, locked)
    ]
    prices = [100 * (b.seconds / a.seconds - 1) for a, b in zip(free, locked, strict=True)]
    return [
        f"{name}, pp {STAGES[name]} tp 8 ep {8 * width}",
        str(width),
        planner,
        spread([each.seconds for each in free], "{:.2f} s"),
        spread([each.seconds for each in locked], "{:.2f} s"),
        spread(prices, "{:+.1f}%"),
        spread(empty, "{:.0f}%"),
        *recompute,
        spread([each.plan_seconds for each in locked], "{:.1f} s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--models", nargs="+", default=["qwen3-30b-a3b", "gpt-oss-120b"], choices=list(STAGES)
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--planners", nargs="+", default=["epp", "infinipipe", "packing"], choices=COMPARED
    )
    parser.add_argument("--lengths", default="wlb")
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--documents", type=int, default=512)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--first", type=int, default=30)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    corpus = open_corpus(args.lengths, args.context)
    numbers = range(args.first, args.first + args.batches)
    batches = [corpus.batch(number, args.documents) for number in numbers]
    text = io.StringIO()
    print("All times are simulated. Medians over the batches, (least..most) behind.\n", file=text)
    print(f"### {args.lengths}, context {args.context // 1024}K, {args.documents} documents of all "
          f"replicas, {args.batches} batches, {DEVICE}\n", file=text)  # fmt: skip
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", file=text)
    for name in args.models:
        for width in args.blocks:
            for planner in args.planners:
                print(f"{name}, {width} replicas, {planner}", file=sys.stderr, flush=True)
                line = row(name, width, planner, batches, args.context)
                print(f"| {' | '.join(line)} |", file=text)
    print(file=text)
    publish(text.getvalue(), args.output)


if __name__ == "__main__":
    main()
