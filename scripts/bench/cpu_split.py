#!/usr/bin/env python3
"""Cost of the split backward, and how `epp` uses it, on this host's CPU.

    scripts/bench/cpu.py --case split [--cases 4096x8 16384x8] [--batches N] [-o RESULT.md]

The job is that of the case pipeline: two stages (gloo, one core each), 8 layers, hidden 512, and
real documents. The first table times one layer, and the LM head with the loss, alone on chunks of
several sizes, on both processes at once. B and the pair of I and W alternate, in changing order;
the table has medians, and median and quartiles of the additional time of I plus W. The second table
has these plans for every batch, one after the other:

    epp   no split backward; the reference for the seconds of the others
    I W   the same plan with I and W, one after the other, in place of each B
    end   the same plan with all W at the end: the memory of deferred W
    wsplit  epp with the lever wsplit: splits backwards if the cost model predicts a gain

Plans epp and wsplit stay within the memory that packing without recompute takes. Plans I W and end
may exceed this memory.
"""

import argparse
import dataclasses
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpu import Size, flags
from headline import heading, host, write
from in_turns import VariantSteps, corpus_of, take_turns, torchrun

VARIANTS = ("epp", "I W", "end", "wsplit")
LINE = "cpu_split: "
SIZES = (16, 64, 256, 1024, 2048, 4096)
REPEATS = 16


# ------------------------------------------------------------------ inside torchrun


def work() -> None:
    """Run Megatron's trainer with the plans of all variants in turn."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    take_turns(VARIANTS, SplitSteps, told, warm_up=1, first=0)


def tell_prices(probe: Any) -> None:
    """Print the seconds of B, I and W of one layer and, on the last stage, of the LM head."""
    from megatron_epp.ir import KEEP
    from megatron_epp.mcore.calibrate.probe import Shape

    for size in SIZES:
        shape = Shape(size)
        for part in ("layer", "output layer") if probe.last else ("layer",):
            whole, halves = [], []
            for repeat in range(REPEATS):
                turn = ((False, whole), (True, halves))
                for split, runs in turn if repeat % 2 else reversed(turn):
                    if part == "layer":
                        runs.append(probe.layers(shape, KEEP, split=split))
                    else:
                        runs.append(probe.ends(shape, split=split))
            entry = {
                "part": part,
                "tokens": size,
                "B": [run.backward_seconds for run in whole],
                "I": [run.backward_seconds for run in halves],
                "W": [run.weight_seconds for run in halves],
            }
            print(LINE + json.dumps(entry), flush=True)


class SplitSteps(VariantSteps):
    def __init__(self, variant_at, place, model):
        from megatron_epp.mcore.calibrate.probe import undisturbed
        from megatron_epp.mcore.calibrate.profile_file import probe_of

        with undisturbed(model):
            tell_prices(probe_of(place.args, model, place.row_shard))
        super().__init__(variant_at, place, model)

    def _plan(self, iteration: int, lengths: Sequence[int]):
        from megatron_epp.planner import plan_step

        ample = self.cost.replace(device_budget_bytes=(1e15,) * self.cost.layout.stages)
        packed = plan_step(lengths, ample, self.options, "packing").planned[0]
        within = self.cost.replace(device_budget_bytes=packed.peak_bytes)
        variant = self.variant_at(iteration)
        levers = self.options.levers - {"wsplit"}
        if variant == "wsplit":
            levers |= {"wsplit"}
        options = dataclasses.replace(self.options, levers=levers)
        step = plan_step(lengths, within, options, "epp").step
        if variant in ("I W", "end"):
            plans = tuple(halved(plan, self.cost, variant == "end") for plan in step.plans)
            step = dataclasses.replace(step, plans=plans)
        return step


def halved(plan: Any, cost: Any, at_end: bool) -> Any:
    """Return ``plan`` with I and W in place of every B, and with a new prediction."""
    from megatron_epp.cost.catalogue.devices import GIB
    from megatron_epp.ir import Kind, Op, Prediction
    from megatron_epp.sim.play import play

    orders = []
    for order in plan.orders:
        ops, late = [], []
        for op in order:
            if op.kind is not Kind.BACKWARD:
                ops.append(op)
                continue
            ops.append(Op(Kind.INPUT, op.chunk))
            (late if at_end else ops).append(Op(Kind.WEIGHT, op.chunk))
        orders.append((*ops, *late))
    plan = dataclasses.replace(plan, orders=tuple(orders), predicted=None)
    played = play(plan, cost.table(plan))
    peaks = tuple(peak / GIB for peak in played.peak_bytes)
    return dataclasses.replace(plan, predicted=Prediction(played.seconds, peaks, "halved"))


def told(variant_of: Callable, iteration: int, step, report, *others) -> str:
    """Return the trainer's log entry of an iteration, as JSON."""
    from megatron_epp.ir import Kind

    plan = step.plans[0]
    backwards = len(plan.chunks) * plan.stages
    entry = {
        "iteration": iteration,
        "seconds": report.seconds,
        "bubble": report.bubble_ratio,
        "peaks": list(report.peak_bytes),
        "expected": [peak * 2**30 for peak in plan.predicted.peak_gib],
        "chunks": len(plan.chunks),
        "split": sum(op.kind is Kind.WEIGHT for order in plan.orders for op in order) / backwards,
        "predicted": plan.predicted.seconds,
    }
    return LINE + json.dumps(entry)


# ------------------------------------------------------------------ outside


def measure(case: str, arguments: argparse.Namespace, corpus: Path, folder: Path) -> list[dict]:
    iterations = 1 + arguments.batches * len(VARIANTS)
    words = flags(Size.parse(case), corpus, iterations, arguments.dtype)
    words += ["--epp", "--epp-effort", str(arguments.effort)]
    program = [str(Path(__file__).resolve()), "--work"]
    text = torchrun(program, words, folder / f"{case}.log")
    return [json.loads(found) for found in re.findall(LINE + r"(\{.*?\})", text)]


PRICE_HEADERS = ["part", "tokens", "B ms", "I ms", "W ms", "price", "quarters"]


def price_rows(entries: list[dict]) -> list[list[str]]:
    """Return table rows over the entries of both processes."""
    made = []
    found = [entry for entry in entries if "part" in entry]
    for part in ("layer", "output layer"):
        for size in SIZES:
            mine = [e for e in found if e["part"] == part and e["tokens"] == size]
            runs = [[seconds for e in mine for seconds in e[k]] for k in "BIW"]
            times = [f"{1e3 * statistics.median(seconds):.2f}" for seconds in runs]
            prices = [(i + w) / b - 1 for b, i, w in zip(*runs, strict=True)]
            low, middle, high = statistics.quantiles(prices)
            made.append([part, str(size), *times, f"{middle:+.1%}", f"{low:+.1%} {high:+.1%}"])
    return made


HEADERS = [
    *("context", "documents", "plan", "seconds", "against epp", "bubble", "split", "chunks"),
    *("peak", "seconds off by", "peak off by"),
]


def rows(case: str, entries: list[dict], batches: int) -> list[list[str]]:
    context, batch = case.split("x")
    found = [entry for entry in entries if "iteration" in entry]
    assert len(found) == 1 + batches * len(VARIANTS), f"{len(found)} iterations were told"
    made = []
    for number, variant in enumerate(VARIANTS):
        mine = found[1 + number :: len(VARIANTS)]
        text_table = found[1 :: len(VARIANTS)]
        pairs = list(zip(mine, text_table, strict=True))
        made.append(
            [
                f"{int(context) // 1024}K",
                batch,
                variant,
                f"{statistics.median(m['seconds'] for m in mine):.2f}",
                f"{statistics.median(m['seconds'] / p['seconds'] for m, p in pairs) - 1:+.1%}",
                f"{statistics.median(m['bubble'] for m in mine):.1%}",
                f"{statistics.median(m['split'] for m in mine):.0%}",
                f"{statistics.median(m['chunks'] for m in mine):.0f}",
                f"{statistics.median(max(m['peaks']) for m in mine) / 2**20:.0f} MiB",
                f"{statistics.median(m['predicted'] / m['seconds'] for m in mine) - 1:+.1%}",
                f"{statistics.median(max(m['expected']) / max(m['peaks']) for m in mine) - 1:+.1%}",
            ]
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=("4096x8", "16384x8"), metavar="CxN")
    parser.add_argument("--batches", type=int, default=3, help="batches of each case")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--effort", type=int, default=4)
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    arguments = parser.parse_args()

    from megatron_epp.show.table import markdown, text_table

    folder = Path(tempfile.mkdtemp(prefix="cpu_split-"))
    corpus = corpus_of(arguments, folder)
    price, table = [], []
    for case in arguments.cases:
        entries = measure(case, arguments, corpus, folder)
        price += [entry for entry in entries if "part" in entry]
        table += rows(case, entries, arguments.batches)
        print(text_table(HEADERS, table), flush=True)
    print(text_table(PRICE_HEADERS, price_rows(price)))
    hardware = f"{host()}, {arguments.dtype}, two processes of one thread"
    write(
        arguments.output,
        f"{heading(hardware)}{markdown(PRICE_HEADERS, price_rows(price))}\n"
        f"{markdown(HEADERS, table)}\n",
    )


if __name__ == "__main__":
    sys.argv.remove("--work")
    work()
