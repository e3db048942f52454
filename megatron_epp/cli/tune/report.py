"""Text report of a layout search: table, reasons for the first row, rejected layouts."""

import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence

from megatron_epp.cli.verdict import PAYS, verdict, why_stock
from megatron_epp.cost.overlap import EXPERTS, TENSOR
from megatron_epp.planner.choose.choice import placement_name
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.planner.feasibility import PLANNING_CORES
from megatron_epp.planner.registry import STOCK
from megatron_epp.planner.tuning.survey import ELASTIC, TIGHT_MEMORY, Choice, Survey
from megatron_epp.show.table import COLUMNS, text_table
from megatron_epp.show.units import GIB, seconds_text, tokens_text

_HEADERS = (
    *("", "tp", "cp", "pp", "dp", "ep", "layers", "runs", "tokens/s", "MFU", "seconds", "GiB", ""),
)
# Words of the table that a line below it explains, where they occur.
_LEGEND = {
    "offload": "activations go to the host's memory where a plan would recompute",
    "vocab": "the LM head is sharded over the stages",
    "stock": "the fastest of Megatron's own schedules, with whole documents packed to the best "
    "length of each batch",
    "overlap": f"hides {TENSOR:.0%} of tensor-parallel exchanges, with documents packed to the "
    f"context, or {EXPERTS:.0%} of experts'",
    "MFU": "the model's own flops, without recompute, over the data sheet's peak of all devices",
    "tight": f"the peak is within {TIGHT_MEMORY:.0%} of the budget",
    "late": f"training would wait for its plans, at {PLANNING_CORES:g} core of a host for each "
    "device",
}


def tuning_lines(
    result: Survey,
    batches: str,
    machines: str,
    rows: Sequence[Choice],
    mfu: Sequence[float | None],
    parts: Mapping[int, Sequence[Mapping[str, float]]],
) -> str:
    """Return a text about the result of the search.

    Args:
        result: result of the search.
        batches: description of the documents.
        machines: description of the devices.
        rows: the choices shown.
        mfu: MFU of each of ``rows``; None if the device's peak is unknown.
        parts: by index in ``rows``, for some rows only: bytes of each rank at its peak by category.
    """
    lines = [*survey_verdict(result), "", f"lengths  {batches}", f"machine  {machines}", ""]
    text = "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent="  ") for line in lines)
    headers, cells = _shown_rows(rows, mfu)
    text += "\n" + text_table(headers, cells) + "\n"
    shown = set(re.findall(r"\w+", " ".join(itertools.chain(headers, *cells))))
    for word, meaning in _LEGEND.items():
        if word in shown:
            text += textwrap.fill(f"{word:<8}  {meaning}", COLUMNS, subsequent_indent=" " * 10)
            text += "\n"
    for row, ranks in parts.items():
        text += textwrap.fill(_parts_text(row, rows[row], ranks), COLUMNS, subsequent_indent="  ")
        text += "\n"
    if result.bounded:
        text += f"{len(result.bounded)} layouts were ruled out by a bound.\n"
    if result.refused:
        text += f"{len(result.refused)} layouts cannot run, such as\n"
        for layout, why in list(result.refused.items())[:3]:
            line = f"  {layout}: {why}"
            text += textwrap.fill(line, COLUMNS, subsequent_indent="    ") + "\n"
    return text


def _shown_rows(
    rows: Sequence[Choice], mfu: Sequence[float | None]
) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells of the table of choices, without columns that no row needs."""
    cells = [_row(n, *each) for n, each in enumerate(zip(rows, mfu, strict=True), 1)]
    shown = [True] * len(_HEADERS)
    shown[_HEADERS.index("ep")] = any(choice.ep > 1 for choice in rows)
    shown[_HEADERS.index("MFU")] = any(each is not None for each in mfu)
    shown[-1] = any(row[-1] for row in cells)
    headers, *table = ([*itertools.compress(row, shown)] for row in (_HEADERS, *cells))
    return headers, table


def _parts_text(row: int, choice: Choice, ranks: Sequence[Mapping[str, float]]) -> str:
    """Return the memory by category of the fullest rank at its peak."""
    rank = max(range(len(ranks)), key=lambda each: sum(ranks[each].values()))
    each = ", ".join(f"{name} {held / GIB:.1f}" for name, held in ranks[rank].items())
    of_all = f"; {choice.batches} batches" if choice.batches > 1 else ""
    return (
        f"Row {row + 1}, the peak of pipeline rank {rank}, in GiB of "
        f"{choice.budget_bytes / GIB:.1f}: {each}{of_all}."
    )


def _row(number: int, choice: Choice, mfu: float | None) -> list[str]:
    layout = choice.layout
    return [
        str(number),
        *(str(degree) for degree in (layout.tp, layout.cp, layout.pp, layout.dp)),
        str(choice.ep),
        _layers(choice),
        runs(choice),
        f"{choice.tokens_per_second:.4g}",
        "" if mfu is None else f"{mfu:.0%}",
        f"{choice.seconds:.4g}",
        f"{choice.peak_bytes / GIB:.1f}",
        ", ".join(["tight"] * choice.tight + ["late"] * choice.late),
    ]


def _layers(choice: Choice) -> str:
    if len(set(choice.layers)) == 1:
        return "even"
    runs = ((layers, len(list(run))) for layers, run in itertools.groupby(choice.layers))
    return " ".join(f"{layers}" if times == 1 else f"{times}x{layers}" for layers, times in runs)


def runs(choice: Choice) -> str:
    """Return the column ``runs`` of a choice: --epp with settings, or stock with its schedule."""
    if choice.stock is not None:
        placement = choice.stock.placement if choice.place else ""
        overlap = "overlap" if choice.stock.overlap else ""
        return ", ".join(filter(None, (STOCK, placement, overlap)))
    runs = ["--epp", "offload" * choice.offload, "vocab" * choice.vocabulary_parallel]
    if choice.place:
        runs.append(f"--epp-placement {placement_name(choice.place)}")
    return ", ".join(filter(None, runs))


def survey_verdict(result: Survey) -> list[str]:
    """Return the sentences above the table: verdict, default row, and reasons for this row."""
    choices, best = result.choices, result.choices[result.default]
    row = f"row {result.default + 1}, " if result.default else ""
    summary = (
        f"Best: {row}{best.layout}, {runs(best)}: {seconds_text(best.seconds)} an iteration, "
        f"{tokens_text(round(best.tokens_per_second))} tokens a second."
    )
    lines = [_verdict(result), summary, *_why(best, choices[result.default + 1 :])]
    if result.stopped:
        lines.insert(0, "Interrupted: this is what was found until then, on one batch or on all.")
    if choices[0].tight:
        lines.append(_tight_first(choices[0], best) if row else _with_spare_memory(choices))
    flags = [] if best.place else layout_flags(best.layers)
    if flags:
        lines.append(f"Layers by time: {' '.join(flags)}")
    if best.layout.pp == 1:
        lines.append(
            "No pipeline is best here: with one stage nothing waits and no stage carries the "
            "LM head alone; plans still pack and cut the documents."
        )
    return lines


def _verdict(result: Survey) -> str:
    """Return the verdict on the fastest rows with and without --epp.

    If the default is neither, or the slower one, the verdict names these rows and the default.
    """
    rows = list(enumerate(result.choices, 1))
    elastic = next((row for row in rows if row[1].planner == ELASTIC), None)
    fastest = next((row for row in rows if row[1].stock is not None), None)
    seconds = elastic[1].seconds if elastic else None
    if fastest is None or (stock := fastest[1].stock) is None:
        text = verdict(seconds, None, "", "")
    else:
        layout, which = fastest[1].layout, f"{fastest[1].layout}, {stock}"
        why = why_stock(stock.overlap, layout.pp)
        text = verdict(seconds, fastest[1].seconds, which, why)
    if not result.default:
        return text
    compared = " and ".join(f"row {row[0]}" for row in (elastic, fastest) if row)
    return f"{text} It is about {compared}, the fastest; the default is row {result.default + 1}."


def _tight_first(first: Choice, best: Choice) -> str:
    """Return a sentence on the first row, which is tight, where another row is the default."""
    peak, budget = first.peak_bytes / GIB, first.budget_bytes / GIB
    faster = best.seconds / first.seconds - 1
    tight = f"tight: {peak:.1f} of {budget:.1f} GiB"
    return f"Row 1 is {faster:.1%} faster, but {tight}. --row 1 takes it."


def _with_spare_memory(choices: Sequence[Choice]) -> str:
    """Return a sentence on the fastest choice whose memory is not tight."""
    text = f"Row 1 is tight: within {TIGHT_MEMORY:.0%} of the memory budget."
    spare = next((number for number, each in enumerate(choices, 1) if not each.tight), None)
    if spare is None:
        return f"{text} So is every other."
    slower = choices[spare - 1].seconds / choices[0].seconds - 1
    return f"{text} Fastest that is not tight: row {spare}, {slower:.1%} slower."


def _why(first: Choice, slower_ones: Sequence[Choice]) -> list[str]:
    """Return how much slower the next two layouts of the same planner are, and the main reasons."""
    others = [c for c in slower_ones if c.layout != first.layout and c.planner == first.planner]
    lines = []
    for other in others[:2]:
        slower = other.seconds / first.seconds - 1
        if slower < PAYS:
            lines.append(f"As good: {other.layout}, {100 * slower:.1f}% slower.")
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
