"""The ``compare`` command: all planners and stock on the same batches, and a verdict."""

import argparse
import dataclasses
import json
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megatron_epp.cli.documents import open_batches
from megatron_epp.cli.layout import named_layout_cost, run_cost
from megatron_epp.cli.machine import padding_text, with_padding
from megatron_epp.cli.outcome import Outcome, known_planner, outcome
from megatron_epp.cli.plan import late_text, options_of, require_sharing
from megatron_epp.cli.progress import Workers, bar
from megatron_epp.cli.verdict import PAYS, verdict, why_stock
from megatron_epp.cost.catalogue.accuracy import accuracy_lines
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.choose.choice import heaviest
from megatron_epp.planner.comparison_methods import ABSENT, comparison_methods
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import COMPARED, PACKED, PLANNERS, STOCK
from megatron_epp.planner.stock import Stock, stock_of
from megatron_epp.show.table import COLUMNS, text_table
from megatron_epp.show.units import GIB, fraction_text, seconds_text

_EPP = "epp"
_APART = "epp apart"  # planner epp without shared prefixes, if documents have any
_KNOWN = (STOCK, "infinipipe")  # the baseline without --epp, and the paper's planner
_WARM_UP = 24  # number of documents
_OTHER_ZERO = (
    "Verdict: none, because --epp trains with ZeRO 1 only. Compare row stock of this table with "
    "row epp of the same command without --zero 3."
)


def run(arguments: argparse.Namespace) -> int:
    """Run the ``compare`` command and return its exit status, 130 after an interrupt.

    Example::

        options = ["compare", "--lengths", "wlb", "--model", "llama3-8b", "--device", "h100-80g"]
        status = run(parse([*options, "--pp", "4", "--tp", "8"]))  # parse of cli.options

    Raises:
        UsageError: if options are missing or contradict each other.
        ValueError: if the corpus cannot be used, or no planner can plan any batch.
    """
    default = (*COMPARED, STOCK, *comparison_methods())
    names = [known_planner(name, STOCK) for name in dict.fromkeys(arguments.planner or default)]
    options = options_of(arguments)
    require_sharing(arguments, names)
    pipelines = [name for name in names if name in PLANNERS]
    chosen_by = _EPP if _EPP in names else (pipelines or names)[0]
    named = named_layout_cost(arguments, chosen_by)
    numbers = range(arguments.first_batch, arguments.first_batch + arguments.batches)
    batches = open_batches(arguments, numbers, named.layout.predictions - 1)
    first = batches[numbers[0]]
    cost = with_padding(named, arguments, batches.first, arguments.dp)
    elastic_cost = run_cost(arguments, cost, batches, options, _EPP) if _EPP in names else cost
    costs = {name: elastic_cost if name == _EPP else cost for name in names if name != STOCK}
    cold = _warm_up(costs, first, options, arguments.dp)
    if _EPP in names and batches.has_prefixes:
        names.insert(names.index(_EPP) + 1, _APART)
        costs[_APART] = run_cost(arguments, cost, batches, options, _EPP, apart=True)
    outcomes: list[Outcome] = []
    failed: dict[str, str] = {}
    stock: Stock | None = None
    if STOCK in names:
        held = [heaviest(batches[each], cost, options.lockstep) for each in numbers]
        try:
            stock = stock_of(held, cost, options, bar)
        except ValueError as error:
            failed[STOCK] = str(error)
            names.remove(STOCK)

    def planned_as(name: str, number: int) -> tuple[Cost, Options, str]:
        if name == _APART:
            return costs[_APART], options, _EPP
        if name != STOCK or stock is None:
            return costs[name], options, name
        tokens = stock.batches[number - arguments.first_batch].tokens
        return stock.cost, dataclasses.replace(options, context=tokens), PACKED

    work = ((number, name) for number in numbers for name in names)
    done, status = 0, 0
    try:
        with Workers() as workers:
            for number, name in bar(work, len(numbers) * len(names), "planning"):
                documents = batches.forest(number) if name == _EPP else batches[number]
                job = number, documents, *planned_as(name, number), arguments.dp
                try:
                    result = outcome(*job, run=workers)
                    outcomes.append(dataclasses.replace(result, planner=name))
                except ValueError as error:
                    failed.setdefault(name, f"batch {number}: " + str(error).split("\n")[0])
                done += name == names[-1]
    except KeyboardInterrupt:
        if not done:
            raise
        print(f"Interrupted: {done} of {len(numbers)} batches.", file=sys.stderr)
        numbers, status = numbers[:done], 130
        outcomes = [each for each in outcomes if each.batch in numbers]
    if not outcomes:
        raise ValueError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    if arguments.json:
        _print_json(outcomes, stock, failed)
        return status
    verdicts = _verdict(outcomes, stock, failed)
    best = _best(names, outcomes, len(numbers))
    for sentence in [_OTHER_ZERO] if verdicts and cost.layout.zero != 1 else (*verdicts, best):
        _say(sentence)
    print()
    _say(f"lengths  {batches}")
    _say(
        f"machine  {cost.layout}, layers {_layers(cost.layout.layers)}{_kinds(cost)}"
        f"{_of_elastic(cost, costs.get(_EPP, cost))}"
    )
    levers = ", ".join(sorted(options.levers)) or "none"
    _say(
        f"levers   {levers}; effort {'by the batch' if options.effort is None else options.effort}"
    )
    if padding := padding_text(cost):
        print(f"padding  {padding}")
    print(f"batches  {numbers[0]} to {numbers[-1]}")
    print()
    print(_table(names, outcomes))
    print(_LEGEND)
    if stock is not None:
        _say(f"stock    the fastest of Megatron's own schedules: {stock}{_static(stock)}")
    slowest = max(outcomes, key=lambda each: each.plan_seconds)
    print()
    _say(
        f"Longest time to plan: {seconds_text(slowest.plan_seconds)} ({slowest.planner}, batch "
        f"{slowest.batch}); the first start took {seconds_text(cold)} more."
    )
    elastic = next((each for each in outcomes if each.planner == _EPP), None)
    if elastic is not None and (slow := elastic.slow_host_line(elastic_cost, options)):
        _say(slow)
    if late := late_text([each for each in outcomes if each.planner == _EPP], cost):
        _say(f"{_EPP}: {late}")
    for name, why in failed.items():
        _say(f"{name} failed: {why}")
    if not arguments.planner and not comparison_methods():
        _say(ABSENT)
    for line in accuracy_lines(cost):
        _say(line)
    return status


def _print_json(
    outcomes: Sequence[Outcome], stock: Stock | None, failed: Mapping[str, str]
) -> None:
    facts = [each.facts() for each in outcomes]
    for each in facts:
        if stock is not None and each["planner"] == STOCK:
            each["stock"] = stock.facts()
    print(json.dumps(facts, indent=1))
    for name, why in failed.items():
        print(f"{name}: {why}", file=sys.stderr)


def _kinds(cost: Cost) -> str:
    """Return notes on layer kinds, expert parallelism and vocabulary parallelism."""
    kinds = f", of the kinds {cost.layout.kinds_text}" if cost.layout.kinds_text else ""
    experts = f", ep {cost.layout.ep}" if cost.layout.ep > 1 else ""
    return kinds + experts + (", vocabulary over the stages" * cost.layout.vocabulary_parallel)


def _of_elastic(cost: Cost, elastic: Cost) -> str:
    """Return a note on the layers, placement and vocabulary settings that only planner epp uses."""
    parts = []
    if elastic.layout.layers != cost.layout.layers:
        parts.append(f"layers {_layers(elastic.layout.layers)}")
    if elastic.layout.place != cost.layout.place:
        parts.append(f"stages on ranks {' '.join(map(str, elastic.layout.placement.place))}")
    if elastic.layout.vocabulary_parallel != cost.layout.vocabulary_parallel:
        parts.append("the vocabulary over the stages")
    return f"; epp with {' and '.join(parts)}" if parts else ""


def _say(line: str) -> None:
    print(textwrap.fill(line, COLUMNS, subsequent_indent=" " * 9, break_on_hyphens=False))


def _best(names: Sequence[str], outcomes: Sequence[Outcome], batches: int) -> str:
    """Return the sentence on the best planner: how much faster it is, and whether its plans fit."""
    by_name = {
        name: {each.batch: each for each in outcomes if each.planner == name} for name in names
    }
    fitting = {
        name: by_batch
        for name, by_batch in by_name.items()
        if len(by_batch) == batches and all(each.fits for each in by_batch.values())
    }
    if not fitting:
        return "Best: none; no planner keeps every batch within the memory budget."
    medians = {
        name: statistics.median(each.seconds for each in by_batch.values())
        for name, by_batch in fitting.items()
    }
    best = min(medians, key=medians.__getitem__)
    known = [name for name in (_EPP, _APART, *_KNOWN) if name != best and by_name.get(name)]
    faster = []
    for name in known:
        both = by_name[name].keys() & fitting[best].keys()
        ratio = statistics.median(
            by_name[name][batch].seconds / fitting[best][batch].seconds for batch in both
        )
        unfit = "" if name in fitting else " (which does not fit)"
        faster.append(f"{ratio:.2f} times as fast as {name}{unfit}")
    text = f"Best: {best}, {seconds_text(medians[best])} a batch"
    if faster:
        text += ", " + " and ".join([", ".join(faster[:-1]), faster[-1]] if faster[1:] else faster)
    text += f"; it fits the memory budget on {'every batch' if batches > 1 else 'the batch'}."
    if best not in (*PLANNERS, _APART, STOCK):
        text += f" Training runs pipeline plans, which {best} does not make."
    return text


def _layers(layers: Sequence[int]) -> str:
    """Return ``8 8 8 8`` as ``4 x 8``."""
    if len(set(layers)) == 1 and len(layers) > 1:
        return f"{len(layers)} x {layers[0]}"
    return " ".join(map(str, layers))


def _warm_up(
    costs: Mapping[str, Cost], lengths: Sequence[int], options: Options, replicas: int
) -> float:
    """Load solver and compiled code by planning a small batch; return the seconds that it took."""
    began = time.perf_counter()
    for name, cost in bar(costs.items(), len(costs), "warm-up"):
        with suppress(ValueError):  # reported when the batch itself is planned
            outcome(0, lengths[: max(_WARM_UP, replicas)], cost, options, name, replicas)
    return time.perf_counter() - began


_HEADERS = (
    *("planner", "seconds", "spread", "vs epp", "gap", "idle", "redo", "comm"),
    *("GiB", "chunks", "plan s", "fits"),
)
_LEGEND = """\
seconds  of one iteration: the median over the batches
spread   longest less shortest, in shares of that median
vs epp   this planner's seconds over epp's, batch by batch: 1.30 takes 30% longer
gap      share of the seconds above a lower bound: no plan of this batch can save more, and maybe
         none can save that much
idle     share of stages x time in which a stage waits (bubbles)
redo     share of stages x time spent on recomputing activations
comm     share of stages x time spent on communication within tensor- and context-parallel groups
         that no computation hides
GiB      the most that a device holds, of all batches
chunks   parts that the batch is cut and packed into
plan s   seconds of planning, median; in training it runs while the batch before is computed
fits     batches whose plan stays within the memory budget\
"""


def _table(names: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    rows = []
    by_epp = {each.batch: each.seconds for each in outcomes if each.planner == _EPP}
    for name in names:
        own = [each for each in outcomes if each.planner == name]
        if not own:
            continue
        seconds = [each.seconds for each in own]
        median = statistics.median(seconds)
        ratios = [each.seconds / by_epp[each.batch] for each in own if by_epp.get(each.batch)]
        rows.append(
            [
                name,
                f"{median:.4g}",
                f"{(max(seconds) - min(seconds)) / median:.0%}" if median else "",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                _median_fraction([each.gap for each in own]),
                _median_fraction([each.slowest.bubble_ratio for each in own]),
                _median_fraction([each.slowest.recompute_ratio for each in own]),
                _median_fraction([each.slowest.comm_ratio for each in own]),
                f"{max(max(each.peak_bytes) for each in own) / GIB:.1f}",
                f"{statistics.median(each.slowest.chunks for each in own):g}",
                f"{statistics.median(each.plan_seconds for each in own):.2f}",
                f"{sum(each.fits for each in own)}/{len(own)}",
            ]
        )
    return text_table(_HEADERS, rows)


def _median_fraction(fractions: Sequence[float]) -> str:
    return fraction_text(max(0.0, statistics.median(fractions)))


def _static(stock: Stock) -> str:
    """Return the job with one packing length for all batches as text; "" with one batch."""
    if len(stock.batches) == 1 or stock.static is None:
        return ""
    return (
        f"; with one length for all batches, {stock.static.tokens} tokens: "
        f"{seconds_text(stock.static.seconds)} a batch"
    )


def _verdict(
    outcomes: Sequence[Outcome], stock: Stock | None, failed: Mapping[str, str]
) -> list[str]:
    """Return the verdict on epp, and a line for each batch on which stock is faster than epp.

    There is no verdict if the user did not ask for both rows.
    """
    both: list[dict[int, Outcome]] = []
    for name in (_EPP, STOCK):
        rows = {each.batch: each for each in outcomes if each.planner == name}
        if not rows and name not in failed:
            return []
        both.append({} if name in failed or not all(r.fits for r in rows.values()) else rows)
    elastic, other = both
    if stock is None or not elastic or not other:
        return [verdict(1.0 if elastic else None, 1.0 if other else None, str(stock), "")]
    ratios = {batch: other[batch].seconds / each.seconds for batch, each in elastic.items()}
    why = why_stock(stock.overlap, stock.cost.layout.stages)
    lines = [verdict(1.0, statistics.median(ratios.values()), str(stock), why)]
    for batch, ratio in ratios.items() if len(ratios) > 1 else ():
        if ratio * (1 + PAYS) < 1:
            lines.append(f"batch {batch}: --epp is {1 / ratio - 1:.1%} slower than stock.")
    return lines
