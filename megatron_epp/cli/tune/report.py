"""The survey for a person: a table, why the first wins, what became of the others."""

import statistics
import textwrap
from collections.abc import Sequence

from megatron_epp.cli.compare import COLUMNS, PAYS
from megatron_epp.cost.overlap import EXPERTS, TENSOR
from megatron_epp.planner.choose.choice import placement_name
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.planner.registry import OVERLAPPED, PACKED, STOCK
from megatron_epp.planner.tuning.survey import ELASTIC, Choice, Survey
from megatron_epp.show.table import text_table
from megatron_epp.show.units import GIB, fraction_text, seconds_text, tokens_text

_HEADERS = (
    *("", "tp", "cp", "pp", "dp", "layers", "runs", "tokens/s", "seconds", "idle", "redo"),
    *("comm", "dp s", "GiB"),
)
_BASELINES = {
    PACKED: "stock, packed",
    STOCK: "stock, packed at best",
    OVERLAPPED: "stock, packed at best, overlaps",
}
_LEGEND = f"""\
runs      --epp, with offloading, with the vocabulary cut over the stages (vocab), or Megatron's own
          schedule with whole documents packed; at best: to the fastest length of each batch;
          overlaps: it hides {TENSOR:.0%} of tensor-parallel exchanges, {EXPERTS:.0%} of experts'
tokens/s  of the whole job; seconds: of an iteration, the mean over the batches
idle redo comm   shares of stages x time: waiting (bubbles), recomputing, and exchanging inside
          stages; what hides behind computation counts as computation
dp s      seconds of the iteration in which replicas exchange and nothing hides it
GiB       the most that a device holds\
"""


def tuning_lines(result: Survey, batches: str, machines: str, top: int) -> str:
    lines = [*_verdict(result), "", f"lengths  {batches}", f"machine  {machines}", ""]
    text = "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent="  ") for line in lines)
    text += "\n" + text_table(_HEADERS, [_row(n, c) for n, c in enumerate(result.choices[:top], 1)])
    text += "\n" + _LEGEND + "\n"
    if result.bounded:
        text += f"{len(result.bounded)} layouts were ruled out by a bound.\n"
    if result.refused:
        text += f"{len(result.refused)} layouts cannot run, such as\n"
        for layout, why in list(result.refused.items())[:3]:
            line = f"  {layout}: {why}"
            text += textwrap.fill(line, COLUMNS, subsequent_indent="    ") + "\n"
    return text


def _row(number: int, choice: Choice) -> list[str]:
    layout = choice.layout
    return [
        str(number),
        *(str(degree) for degree in (layout.tp, layout.cp, layout.pp, layout.dp)),
        _layers(choice),
        _runs(choice),
        f"{choice.tokens_per_second:.4g}",
        f"{choice.seconds:.4g}",
        fraction_text(choice.bubble_ratio),
        fraction_text(choice.recompute_ratio),
        fraction_text(choice.comm_ratio),
        f"{choice.exchange_seconds:.3g}",
        f"{choice.peak_bytes / GIB:.1f}",
    ]


def _layers(choice: Choice) -> str:
    if len(set(choice.layers)) == 1:
        return "even"
    runs: list[list[int]] = []
    for layers in choice.layers:
        if runs and runs[-1][0] == layers:
            runs[-1][1] += 1
        else:
            runs.append([layers, 1])
    return " ".join(f"{layers}" if times == 1 else f"{times}x{layers}" for layers, times in runs)


def _runs(choice: Choice) -> str:
    if choice.planner != ELASTIC:
        return _BASELINES[choice.planner]
    runs = ["--epp", "offload" * choice.offload, "vocab" * choice.vocabulary_parallel]
    if choice.place:
        runs.append(f"--epp-placement {placement_name(choice.place)}")
    return ", ".join(filter(None, runs))


def _verdict(result: Survey) -> list[str]:
    first = result.choices[0]
    summary = (
        f"Best: {first.layout}, {_runs(first)}: {seconds_text(first.seconds)} an iteration, "
        f"{tokens_text(round(first.tokens_per_second))} tokens a second."
    )
    lines = [summary, *_why(result.choices)]
    flags = [] if first.place else layout_flags(first.layers)
    if flags:
        lines.append(f"Layers by time: {' '.join(flags)}")
    elastic = next((c for c in result.choices if c.planner == ELASTIC), None)
    baselines: dict[str, Choice] = {}
    for choice in result.choices:
        if choice.planner != ELASTIC:
            baselines.setdefault(choice.planner, choice)
    fastest = min(baselines.values(), key=lambda choice: choice.seconds, default=None)
    if first.layout.pp == 1:
        lines.append(
            "No pipeline is best here: with one stage nothing waits and no stage carries the "
            "output layer alone; plans still pack and cut the documents."
        )
    if elastic is None:
        lines.append("No --epp is best here: no plan of it fits; leave --epp out.")
    elif fastest is not None and fastest.seconds <= elastic.seconds * (1 + PAYS):
        lines.append(
            f"No --epp is best here: {_BASELINES[fastest.planner]} takes "
            f"{fastest.seconds / elastic.seconds:.3f} of its time ({fastest.layout})."
        )
    elif baselines:
        each = (
            f"{elastic.seconds / choice.seconds:.2f} of that of {_BASELINES[choice.planner]} "
            f"({choice.layout})"
            for choice in baselines.values()
        )
        lines.append(
            f"--epp takes less time than Megatron's own schedule at its best layout: "
            f"{', '.join(each)}."
        )
    return lines


def _why(choices: Sequence[Choice]) -> list[str]:
    """Advantage of the first over the next other layouts: the largest difference in time."""
    first = choices[0]
    others = [c for c in choices[1:] if c.layout != first.layout and c.planner == first.planner]
    lines = []
    for other in others[:2]:
        slower = other.seconds / first.seconds - 1
        if slower < PAYS:
            lines.append(f"As good: {other.layout}, {100 * slower:.1f}% behind.")
            continue
        best, next_best = first.shares, other.shares
        apart = {n: next_best[n] * other.seconds - best[n] * first.seconds for n in best}
        most = max(apart, key=lambda name: apart[name])
        lines.append(
            f"{100 * slower:.1f}% ahead of {other.layout}, mostly by {most}: "
            f"{seconds_text(best[most] * first.seconds)} against "
            f"{seconds_text(next_best[most] * other.seconds)} of an iteration."
        )
    return lines


def spread(played: Sequence[Choice]) -> str:
    """The least, the median and the most of iterations one after another."""
    rows = []
    for name, values in (
        ("seconds", [each.seconds for each in played]),
        ("tokens/s", [each.tokens_per_second for each in played]),
        ("idle", [each.bubble_ratio for each in played]),
        ("redo", [each.recompute_ratio for each in played]),
        ("GiB", [each.peak_bytes / GIB for each in played]),
    ):
        rows.append([name, *(f"{f(values):.4g}" for f in (min, statistics.median, max))])
    head = f"\nThe first choice over {len(played)} iterations of the corpus:\n"
    return head + text_table(("", "least", "median", "most"), rows) + "\n"
