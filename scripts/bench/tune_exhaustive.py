"""Whether `tune`'s first choice is the best there is: against a simulation of everything.

    python scripts/bench/tune_exhaustive.py [--nodes 1] [--documents 64] [--batches 2]
                                            [--lengths wlb prolong wikipedia] [-o RESULT.md]

Everything: every layout, even layers and those by time with one layer moved over any border, with
and without offloading, all replicas planned. Simulated; nothing ran.
"""

import argparse
import dataclasses
import sys
import time

from headline import ROOT, heading, host, write

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.cost import Cost, named_cost
from megatron_epp.cost.devices import device
from megatron_epp.cost.models import model
from megatron_epp.planner import Options, plan_step
from megatron_epp.planner.partition import with_layers
from megatron_epp.planner.tuning.layouts import Layout, layouts
from megatron_epp.planner.tuning.survey import ELASTIC, STOCK, partitions, survey
from megatron_epp.show.table import markdown
from megatron_epp.sim.exchange import exchange
from megatron_epp.sim.play import play


def seconds(cost: Cost, batches, options: Options, planner: str) -> float:
    """Of an iteration, the mean over the batches; infinite where one does not fit."""
    total = 0.0
    for lengths in batches:
        try:
            step = plan_step(lengths, cost, options, planner, cost.dp)
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


def everything(found, batches, cost_for, options: Options) -> dict[tuple, float]:
    """Seconds by (layout, layers, planner, offload)."""
    result: dict[tuple, float] = {}
    for layout in found:
        try:
            even = cost_for(layout)
        except ValueError:
            continue
        tried = set()
        for layers in partitions(even, batches[0], True):
            tried |= neighbours(layers)
        for layers in sorted(tried):
            cost = with_layers(even, layers)
            if cost is None:
                continue
            for planner, levers in (
                (ELASTIC, options.levers),
                (ELASTIC, options.levers | {"offload"}),
                (STOCK, options.levers),
            ):
                chosen = dataclasses.replace(options, levers=levers)
                key = layout, layers, planner, "offload" in levers
                result[key] = seconds(cost, batches, chosen, planner)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--device", default="h100-80g")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--effort", type=int, default=Options().effort)
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
        first = survey(found, batches, cost_for, options).choices[0]
        took = time.process_time() - began
        every = everything(found, batches, cost_for, options)
        best = min(every, key=every.__getitem__)
        mine = every[first.layout, first.layers, first.planner, first.offload]
        rows.append(
            [
                name,
                f"{first.layout}, layers {' '.join(map(str, first.layers))}",
                f"{mine:.4g}",
                f"{best[0]}, layers {' '.join(map(str, best[1]))}",
                f"{every[best]:.4g}",
                f"{mine / every[best]:.4f}",
                f"{len(every)}",
                f"{took:.1f}",
                f"{time.process_time() - began - took:.0f}",
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    headers = ["lengths", "tune's first", "seconds", "best of all", "seconds", "ratio", "tried"]
    text = markdown([*headers, "CPU s: tune", "all"], rows)
    print(text)
    what = (
        f"### {args.model}, {devices} x {args.device}, {args.documents} documents to {args.context}"
    )
    write(args.output, heading(f"{host()}, one core used") + f"{what}\n\n{text}")


if __name__ == "__main__":
    main()
