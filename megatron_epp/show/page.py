"""HTML page that shows an iteration in a browser, without network access.

The page shows the timeline and memory of every rank, the contents and recompute of every chunk, the
critical path, and the reason for each bubble. It has zoom, pan, hover, search and tables. Several
runs of one plan are drawn one above the other.
"""

import html
import json
from importlib import resources
from string import Template
from typing import Any

from megatron_epp.ir import (
    BACKWARDS,
    COMPUTE,
    PlanError,
    Relation,
    Timed,
    rules_of,
    slices_of,
)
from megatron_epp.ir.recompute import format_recompute
from megatron_epp.show import colours
from megatron_epp.show.colours import FAMILIES, palette
from megatron_epp.show.paint import legend
from megatron_epp.show.reasons import op_of
from megatron_epp.show.timeline import (
    Bubble,
    Timeline,
    chunk_names,
    offloaded_fraction,
    offloaded_text,
    recomputed_fraction,
)
from megatron_epp.show.units import tokens_text

# Colours of the page, by their names in its style and script.
_COLOURS = {
    "ink": colours.INK,
    "tip": f"{colours.INK}f2",
    "quiet": colours.QUIET_INK,
    "line": colours.GRID,
    "idle": colours.IDLE,
    "hot": colours.BUDGET,
    "critical": colours.CRITICAL,
    "memory": colours.MEMORY,
    "fill": colours.MEMORY_FILL,
    "mark": "#1d5fbf",
    "other": "#9a5b00",
}


def to_html(timeline: Timeline, *others: Timeline, title: str = "") -> str:
    """Return the HTML text of a page.

    Args:
        timeline: run to show.
        others: more runs of the same plan, such as a measured run.
        title: heading; default: the title of ``timeline``.

    Raises:
        PlanError: the runs are of different plans.
    """
    runs = (timeline, *others)
    if any(run.plan.rank_orders != timeline.plan.rank_orders for run in others):
        raise PlanError("these are runs of different plans; expected runs of one plan")
    heading = title or timeline.title or "plan"
    data = json.dumps(_data(runs, heading), separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # the data must not close the script element
    body = f'{_part("timeline.html")}<script type="application/json" id="data">{data}</script>'
    colours_text = " ".join(f"--{name}: {colour};" for name, colour in _COLOURS.items())
    return Template(_part("page.html")).substitute(
        title=html.escape(heading),
        style=f":root {{ {colours_text} }}\n{_part('page.css')}",
        body=body,
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return resources.files("megatron_epp.show").joinpath(name).read_text(encoding="utf-8")


def _data(runs: tuple[Timeline, ...], title: str) -> dict[str, Any]:
    """Return the data for the page's script: plan, legend, rule table and runs."""
    plan = runs[0].plan
    names, paints, slices = chunk_names(plan), palette(plan), slices_of(plan)
    rules = rules_of(plan)
    return {
        "title": title,
        "colours": _COLOURS,
        "unit": runs[0].unit,
        "summary": f"{runs[0].summary}, {len(plan.documents)} "
        f"documents, {tokens_text(plan.tokens)} tokens{offloaded_text(plan)}",
        "legend": [(marks if thick else "dashed", text) for marks, _, thick, text in legend(runs)],
        "kinds": [
            {
                "letter": kind.value,
                "name": FAMILIES[kind].name,
                "recomputes": kind in BACKWARDS,
                "needs": [
                    [
                        "".join(k.value for k in need.kinds),
                        need.stage,
                        need.chunk.name,
                        need.why,
                        need.at.name,
                    ]
                    for need in (rules[kind].needs if kind in rules else ())
                ],
            }
            for kind in COMPUTE
        ],
        "stages": [{"layers": layers} for layers in plan.layers],
        "rank_of": plan.rank_of,
        "ranks": [plan.rank_name(rank) for rank in range(plan.ranks)],
        "chunks": [
            {
                "name": names[number],
                "spans": str(chunk),
                "tokens": chunk.tokens,
                "pairs": plan.pairs(number),
                "fill": [paints.fill(kind, number) for kind in COMPUTE],
                "ink": paints.ink(number),
                "accent": paints.accent[number],
                "earlier": slices.all_related(number, Relation.EARLIER),
                "later": slices.all_related(number, Relation.LATER),
            }
            for number, chunk in enumerate(plan.chunks)
        ],
        "recompute": [[format_recompute(c) for c in choices] for choices in plan.recompute],
        "recomputed": [
            [round(recomputed_fraction(plan, stage, c), 4) for c in range(len(plan.chunks))]
            for stage in range(plan.stages)
        ],
        "offloaded": [
            [round(offloaded_fraction(plan, stage, c), 4) for c in range(len(plan.chunks))]
            for stage in range(plan.stages)
        ],
        "runs": [_run(run) for run in runs],
    }


def _run(run: Timeline) -> dict[str, Any]:
    return {
        "title": run.title or "run",
        "seconds": run.seconds,
        "bubble_ratio": run.bubble_ratio,
        "idle": [1 - busy / run.seconds if run.seconds else 0.0 for busy in run.busy],
        "peaks": list(run.peak_bytes),
        "budget": list(run.budget_bytes),
        "records": [
            [r.stage, COMPUTE.index(op_of(r).kind), op_of(r).chunk, *_times(r), r.peak_bytes]
            for r in run.records
        ],
        "transfers": [
            [r.stage, str(r.op), FAMILIES[r.op.kind].plain, *_times(r)] for r in run.transfers
        ],
        "bubbles": [[b.rank, *_times(b), b.reason] for b in run.bubbles],
        "critical": [[stage, str(op)] for stage, op in run.critical],
        "curves": [[[_short(at), round(held)] for at, held in curve] for curve in run.curves],
    }


def _times(of: Timed | Bubble) -> tuple[float, float]:
    return _short(of.start), _short(of.stop)


def _short(seconds: float) -> float:
    """Round to ten significant digits, to keep pages with thousands of ops small."""
    return float(f"{seconds:.10g}")
