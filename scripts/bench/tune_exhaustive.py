"""Comparison of `tune`'s first choice with the best choice of an exhaustive simulation.

    python scripts/bench/tune_exhaustive.py [--nodes 1] [--documents 64] [--batches 2]
                                            [--lengths wlb prolong wikipedia]
                                            [--vocab-parallel auto] [-o RESULT.md]

The simulation plans all replicas for all combinations of: every layout; equal layers, and layers
balanced by time with one layer moved over any stage boundary; with and without offloading; and with
auto, the LM head on the last stage or sharded over all stages. Combinations whose lower bound is
above the best result are skipped, which changes only the run time. All numbers are simulated.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

import numpy as np
from headline import ROOT, heading, host, write

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import model
from megatron_epp.cost.cost import Cost
from megatron_epp.planner import STOCK, Options, plan_step
from megatron_epp.planner.choose.partition import with_layers
from megatron_epp.planner.epp.planner import can_be_local
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.tuning.layouts import Layout, layouts
from megatron_epp.planner.tuning.survey import ELASTIC, partitions, survey
from megatron_epp.show.table import markdown
from megatron_epp.sim.exchange import exchange
from megatron_epp.sim.play import play


def seconds(cost: Cost, batches, options: Options, planner: str) -> float:
    """Return mean seconds of an iteration over the batches; infinite if a batch does not fit."""
    total = 0.0
    for lengths in batches:
        try:
            step = plan_step(lengths, cost, options, planner, cost.layout.dp)
        except ValueError:
            return float("inf")
        if not all(found.fits for found in step.planned):
            return float("inf")
        slowest = max(step.planned, key=lambda found: found.seconds)
        plan = dataclasses.replace(slowest.plan, replica=0, replicas=1)
        total += step.seconds + exchange(cost, play(plan, cost.table(plan))).exposed_seconds
    return total / len(batches)


def neighbours(layers: tuple[int, ...]) -> set[tuple[int, ...]]:
    found = {layers}
    for give in range(len(layers)):
        for take in (give - 1, give + 1):
            if not 0 <= take < len(layers) or layers[give] < 2:
                continue
            moved = list(layers)
            moved[give] -= 1
            moved[take] += 1
            found.add(tuple(moved))
    return found


def bound_seconds(cost: Cost, batches, options: Options, planner: str) -> float:
    """Return a lower bound of the mean over batches, for all assignments of documents."""
    local = planner == ELASTIC and "local" in options.levers and can_be_local(cost, options)

    def least(lengths: Sequence[int]) -> float:
        held = np.sort(np.array(lengths))[::-1]
        whole = lower_bound_seconds(held, cost, local=local)
        return max(whole / cost.layout.dp, lower_bound_seconds(held[:1], cost, local=local))

    return float(np.mean([least(lengths) for lengths in batches]))


# Layout, layers, planner, whether it may offload, whether the output layer is cut.
Way = tuple[Layout, tuple[int, ...], str, bool, bool]


def ways(found, batches, cost_for, options: Options, vocabulary: str) -> dict[Way, tuple]:
    """Return cost model, options and lower bound of every combination."""
    result: dict[Way, tuple] = {}
    for layout in found:
        try:
            whole = cost_for(layout)
        except ValueError:
            continue
        cuts = (False, True) if vocabulary == "auto" and layout.pp > 1 else (False,)
        tried = set()
        for cut in cuts:
            for layers in partitions(whole.with_vocabulary(cut), batches[0], True):
                tried |= neighbours(layers)
        for cut in cuts:
            even = whole.with_vocabulary(cut)
            for layers in sorted(tried):
                cost = with_layers(even, layers)
                if cost is None:
                    continue
                for planner, levers in (
                    (ELASTIC, options.levers),
                    (ELASTIC, options.levers | {"offload"}),
                    *([] if cut else [(STOCK, options.levers)]),
                ):
                    chosen = dataclasses.replace(options, levers=levers)
                    bound = bound_seconds(cost, batches, chosen, planner)
                    way = layout, layers, planner, "offload" in levers, cut
                    result[way] = cost, chosen, bound
    return result


def everything(tried: dict[Way, tuple], batches, first: Way) -> dict[Way, float]:
    """Return the seconds of ``first``, and of combinations whose bound is below the best so far."""
    result: dict[Way, float] = {}
    best = float("inf")
    for way in sorted(tried, key=lambda way: (way != first, tried[way][2])):
        cost, options, bound = tried[way]
        if bound < best:
            result[way] = seconds(cost, batches, options, way[2])
            best = min(best, result[way])
    return result


def told(way: Way) -> str:
    layout, layers, planner, offload, cut = way
    more = [", offload"] * offload + [", vocabulary cut"] * cut
    runs = "" if planner == ELASTIC else f", {planner}"
    return f"{layout}, layers {' '.join(map(str, layers))}{''.join(more)}{runs}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--device", default="h100-80g")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--effort", type=int, default=Options().effort)
    parser.add_argument("--vocab-parallel", choices=("off", "auto"), default="off")
    parser.add_argument("--lengths", nargs="+", default=["wlb", "prolong", "wikipedia"])
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    the_model, the_device = model(args.model), device(args.device)
    devices = args.nodes * the_device.node_devices
    found = list(layouts(the_model, devices, the_device.node_devices, args.documents))

    def cost_for(layout: Layout) -> Cost:
        return named_cost(
            args.model,
            args.device,
            **{name: getattr(layout, name) for name in ("pp", "tp", "cp", "dp")},
            zero=1,
            **AS_TRAINED,
        )

    rows = []
    options = Options(args.context, effort=args.effort)
    for name in args.lengths:
        corpus = open_corpus(name, args.context)
        batches = [corpus.batch(number, args.documents) for number in range(args.batches)]
        began = time.process_time()
        made = survey(found, batches, cost_for, options, vocabulary=args.vocab_parallel)
        first = made.choices[0]
        took = time.process_time() - began
        mine: Way = (
            *(first.layout, first.layers, first.planner, first.offload),
            first.vocabulary_parallel,
        )
        tried = ways(found, batches, cost_for, options, args.vocab_parallel)
        every = everything(tried, batches, mine)
        best = min(every, key=every.__getitem__)
        rows.append(
            [
                name,
                told(mine),
                f"{every[mine]:.4g}",
                told(best),
                f"{every[best]:.4g}",
                f"{every[mine] / every[best]:.4f}",
                f"{len(every)} of {len(tried)}",
                f"{took:.1f}",
                f"{time.process_time() - began - took:.0f}",
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    headers = ["lengths", "tune's first", "seconds", "best of all", "seconds", "ratio", "planned"]
    text = markdown([*headers, "CPU s: tune", "all"], rows)
    print(text)
    what = (
        f"### {args.model}, {devices} x {args.device}, {args.documents} documents to {args.context}"
    )
    write(args.output, heading(f"{host()}, one core used") + f"{what}\n\n{text}")


if __name__ == "__main__":
    main()
