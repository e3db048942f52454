"""The ``draw`` command: the predicted timeline of a plan, the measured timeline, or both."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.cli import machine, recorded_settings
from megatron_epp.cli.files import read_plan, read_records, require_run_of, write_file
from megatron_epp.cli.options import UsageError
from megatron_epp.ir import Plan
from megatron_epp.ir.errors import quoted
from megatron_epp.show.paint import WIDEST, draw_timelines
from megatron_epp.show.text import text_gantt
from megatron_epp.show.timeline import Timeline, timeline, timeline_of
from megatron_epp.sim.in_step import in_step
from megatron_epp.sim.play import play
from megatron_epp.sim.unit_table import unit_table

Runs = list[Timeline]
_SUFFIXES = (".svg", ".png", ".html", ".txt", ".json")


def run(arguments: argparse.Namespace) -> int:
    """Run the ``draw`` command and return its exit status.

    Without --output the command prints text; otherwise the suffix of the file selects the format.

    Example::

        status = run(parse(["draw", "p.plan", "-o", "p.html"]))  # parse of cli.options

    Raises:
        UsageError: if the suffix of --output is unknown, or other options are invalid.
        PlanError: if the plan is invalid or cannot run.
        ValueError: if a file cannot be read or written, or the records are not a run of the plan.
    """
    plan, settings_text, block = read_plan(arguments.plan, arguments.replica)
    taken = recorded_settings.fill_in(arguments, settings_text)
    runs = _runs(arguments, plan, block)
    if arguments.output is None:
        for one in runs:
            sys.stdout.write(text_gantt(one, arguments.width, colour=sys.stdout.isatty()))
        return 0
    suffix = Path(arguments.output).suffix.lower()
    if suffix == ".csv":
        raise UsageError(
            f"-o {arguments.output}: the CSV of torch.distributed.pipelining was removed; the plan "
            "lists the ops of each stage"
        )
    if suffix not in _SUFFIXES:
        raise UsageError(
            f"-o {arguments.output}: unknown ending {quoted(suffix or '(none)')}; "
            f"expected one of {', '.join(_SUFFIXES)}"
        )
    write_file(arguments.output, _content(runs, suffix, arguments))
    print(f"wrote {arguments.output}" + (f" for {taken} (the plan's own)" if taken else ""))
    return 0


def _runs(arguments: argparse.Namespace, plan: Plan, block: Sequence[Plan]) -> Runs:
    """Return the timelines to draw: predicted, measured, or both.

    The result includes the prediction if the options name a machine, or give no measurement.
    """
    title = _title(arguments)
    runs = []
    if machine.names_machine(arguments):
        cost = machine.plan_cost(arguments, plan)
        played = play(plan, in_step([cost.table(one) for one in block])[0])
        budgets = cost.device_budget_bytes
        kinds = f", layers {cost.layout.kinds_text}" if cost.layout.kinds_text else ""
        runs.append(timeline_of(played, f"{title}, predicted{kinds}", budgets))
    elif arguments.records is None:
        runs.append(timeline_of(play(plan, unit_table(plan)), title, unit="units"))
    if arguments.records is not None:
        budget = runs[0].budget_bytes if runs else ()
        records = read_records(arguments.records)
        runs.append(timeline(plan, records, f"{title}, measured", budget_bytes=budget))
        require_run_of(plan, records, arguments.records)
    return runs


def _title(arguments: argparse.Namespace) -> str:
    """Return the title as one line of printable characters."""
    title = arguments.title or Path(arguments.plan).name
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in title)


def _content(runs: Runs, suffix: str, arguments: argparse.Namespace) -> str | bytes:
    """Return the content of the file; only the module of its format is imported."""
    if suffix == ".txt":
        return "\n".join(text_gantt(one, arguments.width or 120) for one in runs)
    if suffix == ".html":
        from megatron_epp.show.page import to_html

        return to_html(*runs, title=_title(arguments))
    if suffix == ".json":
        from megatron_epp.show.trace import to_trace

        return to_trace(runs[-1])
    picture = draw_timelines(*runs, width=arguments.width)
    if suffix == ".svg":
        from megatron_epp.show.svg import to_svg

        return to_svg(picture)
    from megatron_epp.show.png import to_png

    return to_png(picture, scale=1.0 if arguments.width else WIDEST / picture.width)
