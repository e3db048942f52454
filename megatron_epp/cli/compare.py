"""``compare``: every planner on the same batches, with the spread, and where epp does not pay."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from megatron_epp.cli.documents import open_batches
from megatron_epp.cli.layout import layout_cost
from megatron_epp.cli.outcome import Outcome, known_planner, outcome
from megatron_epp.cli.plan import options_of
from megatron_epp.cli.progress import bar
from megatron_epp.cost.cost import Cost
from megatron_epp.planner import PLANNERS, Options
from megatron_epp.show.table import plain
from megatron_epp.show.units import GIB, seconds_text, share_text

# A gain below this is none: no model of costs is that exact.
PAYS = 0.01
_OURS, _PAPER = "epp", "infinipipe"
_WARM_UP = 24  # documents


def run(arguments: argparse.Namespace) -> int:
    names = [known_planner(name) for name in dict.fromkeys(arguments.planner or PLANNERS)]
    options = options_of(arguments)
    numbers = range(arguments.first_batch, arguments.first_batch + arguments.batches)
    batches = open_batches(arguments, numbers)
    first = batches[numbers[0]]
    cost = layout_cost(arguments, first, options, names[0])
    cold = _warm_up(names, first, cost, options, arguments.dp)
    made: list[Outcome] = []
    failed: dict[str, str] = {}
    work = [(number, name) for number in numbers for name in names]
    for number, name in bar(work, len(work), "planning"):
        try:
            made.append(outcome(number, batches[number], cost, options, name, arguments.dp))
        except ValueError as error:
            failed.setdefault(name, f"batch {number}: " + str(error).split("\n")[0])
    if not made:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    if arguments.json:
        print(json.dumps([each.facts() for each in made], indent=1))
        for name, why in failed.items():
            print(f"{name}: {why}", file=sys.stderr)
        return 0
    print(f"lengths  {batches}")
    print(
        f"machine  {cost.profile.provenance.model} on {cost.devices * cost.dp} x "
        f"{cost.profile.provenance.device}: pp {cost.stages}, cp {cost.cp}, tp {cost.tp}, "
        f"dp {cost.dp}, zero {cost.zero}, layers {' '.join(map(str, cost.layers))}"
    )
    print(f"levers   {', '.join(sorted(options.levers)) or 'none'}; effort {options.effort}")
    print(f"batches  {numbers[0]} to {numbers[-1]}; medians, with the lowest and highest")
    print()
    print(_table(names, made))
    print("gap: seconds over a lower bound that no plan beats; worst: the longest plan time")
    print(f"cold start {seconds_text(cold)}, not in the plan times", end="")
    print("".join(f"\n{line}" for line in _verdict(made)))
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    return 0


def _warm_up(
    names: Sequence[str], lengths: Sequence[int], cost: Cost, options: Options, replicas: int
) -> float:
    """Load solver and compiled code by planning a small batch; how long that took."""
    began = time.perf_counter()
    for name in names:
        try:
            outcome(0, lengths[: max(_WARM_UP, replicas)], cost, options, name, replicas)
        except ValueError:
            continue  # said again, with its batch, when the batch itself is planned
    return time.perf_counter() - began


def _table(names: Sequence[str], made: Sequence[Outcome]) -> str:
    headers = [
        "planner",
        "seconds",
        "lowest-highest",
        "epp is faster by",
        "gap",
        "bubbles",
        "recompute",
        "comm",
        "peak GiB",
        "chunks",
        "pipelines",
        "plan s",
        "worst",
        "fits",
    ]
    rows = []
    ours = {each.batch: each.seconds for each in made if each.planner == _OURS}
    for name in names:
        mine = [each for each in made if each.planner == name]
        if not mine:
            continue
        seconds = [each.seconds for each in mine]
        ratios = [each.seconds / ours[each.batch] for each in mine if ours.get(each.batch)]
        rows.append(
            [
                name,
                f"{statistics.median(seconds):.4g}",
                f"{min(seconds):.4g}-{max(seconds):.4g}",
                f"{statistics.median(ratios):.3f} x" if ratios and name != _OURS else "",
                _median_share([each.gap for each in mine]),
                _median_share([each.slowest.bubble_ratio for each in mine]),
                _median_share([each.slowest.recompute_ratio for each in mine]),
                _median_share([each.slowest.comm_ratio for each in mine]),
                f"{max(max(each.peak_bytes) for each in mine) / GIB:.2f}",
                f"{statistics.median(each.slowest.chunks for each in mine):g}",
                f"{statistics.median(each.slowest.pipelines for each in mine):g}",
                f"{statistics.median(each.plan_seconds for each in mine):.3f}",
                f"{max(each.plan_seconds for each in mine):.3f}",
                f"{sum(each.fits for each in mine)}/{len(mine)}",
            ]
        )
    return plain(headers, rows)


def _median_share(shares: Sequence[float]) -> str:
    return share_text(statistics.median(shares))


def _verdict(made: Sequence[Outcome]) -> list[str]:
    """On which batches epp pays, and on which it does not."""
    by_batch: dict[int, dict[str, Outcome]] = {}
    for each in made:
        by_batch.setdefault(each.batch, {})[each.planner] = each
    lines = []
    gains = []
    for batch, planners in by_batch.items():
        ours = planners.get(_OURS)
        others = [each for name, each in planners.items() if name != _OURS and each.fits]
        if ours is None or not others:
            continue
        best = min(others, key=lambda each: each.seconds)
        gains.append(best.seconds / ours.seconds)
        if not ours.fits:
            lines.append(f"batch {batch}: epp does not fit the budget, {best.planner} does")
        elif best.seconds < ours.seconds * (1 + PAYS):
            lines.append(
                f"batch {batch}: epp does not pay: {best.planner} takes "
                f"{best.seconds / ours.seconds:.3f} of its time"
            )
    if not gains:
        return []
    head = (
        f"epp against the best of the others: {statistics.median(gains):.3f} x "
        f"({min(gains):.3f} to {max(gains):.3f}); it pays on "
        f"{len(gains) - len(lines)} of {len(gains)} batches"
    )
    return [head, *lines]
