"""Entry of ``tune``: describe a model, print what fits, or search layouts and write their files."""

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence

from megatron_epp.cli.documents import Batches, open_batches
from megatron_epp.cli.files import write_file
from megatron_epp.cli.layout import AUTO
from megatron_epp.cli.options import UsageError
from megatron_epp.cli.plan import levers_of
from megatron_epp.cli.progress import Workers, bar
from megatron_epp.cli.tune.describe import NOT_PLANNED, print_model, states_bytes
from megatron_epp.cli.tune.how_many import how_many
from megatron_epp.cli.tune.job import TunedJob, job_of
from megatron_epp.cli.tune.report import runs, tuning_lines
from megatron_epp.cli.tune.script import launch_script, layouts_line, require_sayable
from megatron_epp.cost.catalogue.accuracy import accuracy_lines
from megatron_epp.cost.catalogue.models import model, model_config
from megatron_epp.cost.network.topology import Topology
from megatron_epp.planner.options import Options
from megatron_epp.planner.tuning.node_map import NodeMap, map_nodes
from megatron_epp.planner.tuning.parts import memory_parts
from megatron_epp.planner.tuning.survey import (
    ELASTIC,
    Choice,
    Survey,
    slow_hosts,
    survey,
)
from megatron_epp.show.grid import grid_text
from megatron_epp.show.table import COLUMNS
from megatron_epp.show.units import GIB

# Options that need the search, and therefore --lengths.
_OF_SURVEY = (*("row", "parts", "script", "hostfile"),)


def run(arguments: argparse.Namespace) -> int:
    """Run the ``tune`` command and return its exit status.

    Without --lengths the command describes the model, or prints what fits on --gpus. With
    --lengths it searches the layouts of one number of devices.

    Example::

        options = ["tune", "--model", "config.json", "--device", "h100-80g", "--gpus", "16,32"]
        status = main(options)  # megatron_epp.__main__.main, which calls run

    Raises:
        UsageError: if options are missing or contradict each other.
        ValueError: if the model or the corpus cannot be used, or no layout works.
    """
    the_model = model(arguments.model, arguments.like)
    config = model_config(arguments.model, arguments.like)
    if arguments.lengths is None:
        for name in _OF_SURVEY:
            if getattr(arguments, name):
                raise UsageError(f"--{name.replace('_', '-')}: of a survey; expected --lengths too")
        if arguments.gpus is None and arguments.nodes is None and arguments.device is None:
            return print_model(the_model, config, arguments)
        return how_many(the_model, config, arguments)
    if len(arguments.gpus or ()) > 1:
        raise UsageError(
            "--gpus: several numbers are a table of what fits; leave --lengths out, or give one"
        )
    job = job_of(arguments, the_model, config, arguments.gpus[0] if arguments.gpus else None)
    if arguments.script is not None:
        require_sayable(the_model, config)
    batches = open_batches(arguments, range(1, 3))
    drawn = [batches[number] for number in range(arguments.batches)]
    job = dataclasses.replace(job, batches=batches.first)
    options = Options(arguments.context, levers_of(arguments))
    if arguments.effort is not None:
        options = dataclasses.replace(options, effort=arguments.effort)
    with Workers() as workers:
        result = _survey(job, drawn, options, workers)
        row = _row(result, arguments)
        _write_and_print(job, result, row, batches, drawn, options)
    if arguments.script is not None:  # last: a row that Megatron cannot run ends with status 2
        _write_script(job, result, row, batches, len(drawn[0]))
    return 130 if result.stopped else 0


def _survey(
    job: TunedJob, drawn: Sequence[Sequence[int]], options: Options, workers: Workers
) -> Survey:
    """Return the result of the search; raise a ValueError if no layout works."""
    arguments, documents = job.arguments, len(drawn[0])
    candidates = job.layouts(documents)
    if not candidates:
        raise UsageError(
            f"{job.devices} devices: no tp x cp x pp x dp fills them for {job.model.name} with "
            f"{documents} documents in a global batch; expected a --global-batch-size that many "
            "of the number's divisors divide, or another number of devices"
        )
    result = survey(
        candidates,
        drawn,
        job.cost_for,
        options,
        top=arguments.top,
        placement=arguments.placement == AUTO,
        vocabulary=arguments.vocab_parallel,
        words=job.model.vocabulary,
        progress=bar,
        run=workers,
    )
    if result.choices:
        return result
    if result.stopped:
        raise KeyboardInterrupt
    each = states_bytes(job.model) / job.devices / GIB
    reasons = "; ".join(f"{layout}: {why}" for layout, why in list(result.refused.items())[:2])
    raise ValueError(
        f"no layout of the {job.devices} devices works, of {len(candidates)}; states alone are "
        f"{each:.1f} GiB on each of {job}, spread evenly ({reasons}). More --gpus or another "
        "--device: leave --lengths out and give --gpus 16,32,64 for a table of what fits"
    )


def _row(result: Survey, arguments: argparse.Namespace) -> int:
    """Return the number of the row that --row names, or of the default."""
    if arguments.row is None:
        return result.default + 1
    rows = len(result.choices)
    if arguments.row > rows:
        raise UsageError(f"--row {arguments.row}: there are {rows}; expected 1 to {rows}")
    return arguments.row


def _write_and_print(
    job: TunedJob,
    result: Survey,
    row: int,
    batches: Batches,
    drawn: Sequence[Sequence[int]],
    options: Options,
) -> None:
    """Write the files that the options name for row ``row``; print the table or its JSON."""
    arguments, documents, chosen = job.arguments, len(drawn[0]), result.choices[row - 1]
    nodes = _nodes(job, chosen)
    if nodes is not None and arguments.hostfile is not None:
        write_file(arguments.hostfile, "".join(f"{host}\n" for host in nodes.hosts))
    rows = result.choices[: max(arguments.top, row)]
    shown = rows if arguments.parts else [chosen]
    parts = {
        rows.index(each): memory_parts(each.plan, each.cost)
        for each in shown
        if each.plan is not None and each.cost is not None
    }
    mfu = [job.mfu(each, drawn) for each in rows]
    if arguments.json:
        facts = _facts(result, rows, row)
        for at, of_devices in enumerate(mfu):
            facts["choices"][at]["mfu"] = of_devices
        for at, ranks in parts.items():
            facts["choices"][at]["memory_parts"] = ranks
        if nodes is not None:
            facts["node_map"] = _node_facts(nodes)
        if chosen.planner == ELASTIC:
            facts["layouts_line"] = layouts_line(job, chosen)
        print(json.dumps(facts, indent=1))
        return
    hosts = f" in hosts of {job.host_devices}" * (job.host_devices < job.node_devices)
    machines = (
        f"{job.model.name} on {job.nodes} nodes of {job.node_devices} x {job.device.name}{hosts}, "
        f"{documents} documents a batch, {arguments.batches} batches{_padding(chosen)}"
    )
    print(tuning_lines(result, str(batches), machines, rows, mfu, parts), end="")
    for line in (
        *(f"note: {note}" for note in (job.config.notes if job.config is not None else ())),
        f"not planned: {NOT_PLANNED}",
        *_slow_host_lines(result, drawn[0], options),
        *accuracy_lines(job.cost_for(chosen.layout)),
    ):
        print(textwrap.fill(line, COLUMNS, subsequent_indent="  "))
    if chosen.planner == ELASTIC:
        print(f"for a file of --epp-layouts: {layouts_line(job, chosen)}")
    if nodes is not None:
        print(_node_lines(nodes), end="")


def _nodes(job: TunedJob, chosen: Choice) -> NodeMap | None:
    """Return the nodes of ``chosen`` on the grid of --topology; None without a grid."""
    if not isinstance(job.joined, Topology) or not job.joined.nodes:
        return None
    return map_nodes(job.joined, chosen.layout, job.node_devices, chosen.ep)


def _write_script(
    job: TunedJob, result: Survey, row: int, batches: Batches, documents: int
) -> None:
    """Write the launch script of row ``row``.

    Raises:
        UsageError: if the row is Megatron's own schedule, and Megatron cannot run it.
    """
    arguments, chosen = job.arguments, result.choices[row - 1]
    context = arguments.context or int(batches.corpus.inputs.max())
    nodes = _nodes(job, chosen)
    hosts = nodes.hosts if nodes is not None and nodes.grid.hosts else ()
    try:
        text = launch_script(job, chosen, documents, context, hosts)
    except ValueError as error:
        elastic = (n for n, each in enumerate(result.choices, 1) if each.planner == ELASTIC)
        best = next(elastic, None)
        remedy = f"row {best} is the best with --epp: --row {best}" if best else "no row has --epp"
        raise UsageError(f"--script: row {row}, {runs(chosen)}: {error}; {remedy}") from error
    write_file(arguments.script, text)
    print(f"wrote {arguments.script}", file=sys.stderr)


def _slow_host_lines(result: Survey, lengths: Sequence[int], options: Options) -> list[str]:
    """Return a line on what the best plan of --epp loses on slow hosts, if that is much."""
    elastic = ((n, each) for n, each in enumerate(result.choices, 1) if each.planner == ELASTIC)
    row, best = next(elastic, (0, None))
    line = slow_hosts(best, lengths, options) if best is not None else None
    return [f"row {row}: {line}"] if line else []


def _padding(first: Choice) -> str:
    """Return a note: training pads the rows of each device to a multiple; "" if that is 1."""
    of_device = first.multiple // (first.layout.tp * first.layout.cp)
    return f"; rows of a device padded to multiples of {of_device}" if of_device > 1 else ""


def _facts(result: Survey, rows: Sequence[Choice], row: int) -> dict:
    return {
        "choices": [choice.facts() for choice in rows],
        "row": row,
        "refused": {str(layout): why for layout, why in result.refused.items()},
        "bounded": [str(layout) for layout in result.bounded],
        **({"stopped": True} if result.stopped else {}),
    }


def _node_lines(nodes: NodeMap) -> str:
    """Return the grid as text, followed by the hosts in the order of node ranks."""
    grid = nodes.grid
    rows, columns = grid.nodes
    summary = f"{nodes.topology.name}, {rows} x {columns} nodes: {nodes.layout} on "
    summary += f"{len(nodes.nodes)}, {len(grid.failed_nodes)} failed, {len(nodes.spares)} spare"
    if nodes.displaced:
        summary += f"; {nodes.displaced} stand in for a failed one of another column"
    ranks = ", ".join(f"{rank} {host}" for rank, host in enumerate(nodes.hosts))
    order = textwrap.fill(f"hosts by node rank: {ranks}", COLUMNS, subsequent_indent="  ")
    picture = grid_text(rows, columns, nodes.labels(), grid.failed_nodes)
    return f"\n{summary}\n\n{picture}\n{order}\n"


def _node_facts(nodes: NodeMap) -> dict:
    """Return the map for JSON: nodes and hosts by node rank, spares, replacements."""
    return {
        "nodes": [list(place) for place in nodes.nodes],
        "hosts": list(nodes.hosts),
        "spares": [list(place) for place in nodes.spares],
        "displaced": nodes.displaced,
    }
