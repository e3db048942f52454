"""From options to a survey, a table, a script."""

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence

from megatron_epp.cli import machine
from megatron_epp.cli.compare import COLUMNS
from megatron_epp.cli.documents import Batches, open_batches
from megatron_epp.cli.files import write_file
from megatron_epp.cli.flags import ASSUMPTIONS
from megatron_epp.cli.options import UsageError
from megatron_epp.cli.plan import levers_of
from megatron_epp.cli.progress import bar
from megatron_epp.cli.tune.nodes import grid_svg, node_facts, node_lines
from megatron_epp.cli.tune.report import spread, tuning_lines
from megatron_epp.cli.tune.script import launch_script, require_sayable
from megatron_epp.cost.catalogue.devices import device, differ_by_rank
from megatron_epp.cost.catalogue.models import Model, model, model_config
from megatron_epp.cost.catalogue.public import accuracy_lines
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.network.topology import FLAT, Topology, topology
from megatron_epp.frameworks.settings import require_framework, settings_of
from megatron_epp.frameworks.stock_settings import stock_choice
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PACKED, STOCK
from megatron_epp.planner.tuning.layouts import JobRequest, Layout, layouts
from megatron_epp.planner.tuning.node_map import NodeMap, map_nodes
from megatron_epp.planner.tuning.survey import Choice, Survey, choice_of, survey


def run(arguments: argparse.Namespace) -> int:
    _require_framework(arguments)
    if differ_by_rank(arguments.device):
        raise UsageError(
            f"--device {arguments.device}: tune tries pipelines of many lengths, all "
            "of one device; compare layouts of devices that differ with `compare`"
        )
    the_model = model(arguments.model, arguments.like)
    the_device = device(arguments.device)
    if arguments.script is not None and arguments.framework is None:
        require_sayable(the_model, model_config(arguments.model, arguments.like))
    if the_model.mtp_layers_count:
        raise UsageError(
            f"{the_model.name} predicts further tokens, of which the settings that are printed say "
            "nothing; tune it without, or compare layouts with `compare`"
        )
    node_devices = arguments.devices_per_node or the_device.node_devices
    devices = arguments.nodes * node_devices
    batches = open_batches(arguments, range(1, 3))
    drawn = [batches[number] for number in range(arguments.batches)]
    documents = len(drawn[0])
    joined, first_batches = _joined(arguments, node_devices), batches.first
    _require_grid(arguments, joined)

    def cost_for(layout: Layout) -> Cost:
        cost = _cost(arguments, the_model, layout, joined)
        return machine.with_padding(cost, arguments, first_batches, layout.dp)

    pp = arguments.pp
    if pp is None and len(arguments.memory_budget_gib or ()) > 1:  # one for every pipeline rank
        pp = len(arguments.memory_budget_gib)
    wanted = JobRequest(arguments.tp, arguments.cp, pp, arguments.dp)
    candidates = list(layouts(the_model, devices, node_devices, documents, wanted))
    if not candidates:
        raise UsageError(
            f"{devices} devices: no tp x cp x pp x dp fills them for {the_model.name} with "
            f"{documents} documents in a global batch; expected a --global-batch-size that many "
            "of the number's divisors divide, or another number of --nodes"
        )
    options = Options(arguments.context, levers_of(arguments))
    if arguments.effort is not None:
        options = dataclasses.replace(options, effort=arguments.effort)
    result = survey(
        candidates,
        drawn,
        cost_for,
        options,
        top=arguments.top,
        partition=arguments.partition == "auto",
        vocabulary=arguments.vocab_parallel,
        placement=arguments.placement == machine.AUTO_PLACEMENT,
        stock=STOCK if arguments.framework is None else PACKED,
        progress=bar,
    )
    if not result.choices:
        reasons = "; ".join(f"{layout}: {why}" for layout, why in list(result.refused.items())[:3])
        raise ValueError(f"no layout of the {devices} devices works ({reasons})")
    first = result.choices[0]
    played: list[Choice] = []
    if arguments.dry_run_corpus:
        played = _dry_run(first, batches, cost_for(first.layout), options, arguments)
    nodes: NodeMap | None = None
    if isinstance(joined, Topology) and joined.nodes:
        nodes = map_nodes(joined, first.layout, node_devices, first.ep)
        if arguments.hostfile is not None:
            write_file(arguments.hostfile, "".join(f"{host}\n" for host in nodes.hosts))
        if arguments.grid_svg is not None:
            write_file(arguments.grid_svg, grid_svg(nodes))
    context = arguments.context or int(batches.corpus.inputs.max())
    settings_lines: list[str] = []
    if arguments.framework is not None:
        stock, job = stock_choice(result, drawn, cost_for, options, context)
        settings_lines = settings_of(arguments.framework, job)
    if arguments.script is not None and settings_lines:
        write_file(arguments.script, "\n".join(settings_lines) + "\n")
    elif arguments.script is not None:
        hosts = nodes.hosts if nodes is not None and nodes.grid.hosts else ()
        text = launch_script(the_model, first, arguments, node_devices, documents, context, hosts)
        write_file(arguments.script, text)
    if arguments.json:
        facts = _facts(result, arguments.top)
        if settings_lines:
            facts["settings"] = {"framework": arguments.framework, "lines": settings_lines}
            facts["settings"]["choice"] = stock.facts()
        if nodes is not None:
            facts["node_map"] = node_facts(nodes)
        if played:
            facts["dry_run"] = [each.facts() for each in played]
        print(json.dumps(facts, indent=1))
        return 0
    machines = (
        f"{the_model.name} on {arguments.nodes} nodes of {node_devices} x {the_device.name}, "
        f"{documents} documents a batch, {arguments.batches} batches{_rows(first)}"
    )
    print(tuning_lines(result, str(batches), machines, arguments.top), end="")
    for line in accuracy_lines(cost_for(first.layout).layout.profile):
        print(textwrap.fill(line, COLUMNS, subsequent_indent="  "))
    if nodes is not None:
        print(node_lines(nodes), end="")
    if settings_lines:
        rate = f"{stock.tokens_per_second:.4g} tokens/s"
        print(f"\n{stock.layout} by Megatron's own schedule, {rate}, for {arguments.framework}:")
        print("\n".join(f"    {line}" for line in settings_lines))
    if played:
        print(spread(played), end="")
    if arguments.script is not None:
        print(f"wrote {arguments.script}", file=sys.stderr)
    return 0


def _require_framework(arguments: argparse.Namespace) -> None:
    """UsageError: a framework that is not known, or a setting that only --epp has."""
    name = arguments.framework
    if name is None:
        return
    require_framework(name)
    if arguments.vocab_parallel == "on":
        raise UsageError(f"--for {name}: --vocab-parallel on is --epp's, {name} cannot say it")
    if arguments.levers != "default":
        raise UsageError(f"--for {name}: --levers are of --epp's plans, {name} cannot say them")


def _rows(first: Choice) -> str:
    """Text on the rows of a device, which training pads alike in all layouts of its devices."""
    of_device = first.multiple // (first.layout.tp * first.layout.cp)
    return f"; rows of a device padded to multiples of {of_device}" if of_device > 1 else ""


def _joined(arguments: argparse.Namespace, node_devices: int) -> str | Topology:
    """The topology that was named, of nodes of that size."""
    name = arguments.topology or str(machine.AS_TRAINED["topology"])
    named = topology(name)
    if named is None:
        return FLAT
    if arguments.devices_per_node or not named.node_devices:
        return dataclasses.replace(named, node_devices=node_devices)
    if named.node_devices != node_devices:
        raise UsageError(
            f"--topology {name}: its nodes have {named.node_devices} devices; give "
            f"--devices-per-node {named.node_devices}"
        )
    return named


def _require_grid(arguments: argparse.Namespace, joined: str | Topology) -> None:
    """Raise a UsageError where what is asked for needs a grid, or more nodes than are left."""
    grid = joined.grid if isinstance(joined, Topology) and joined.nodes else None
    for name in ("hostfile", "grid_svg"):
        if grid is None and getattr(arguments, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')}: expected a --topology file that has nodes, the rows "
                "and columns of a grid"
            )
    if grid is None:
        return
    if arguments.nodes > len(grid.live):
        rows, columns = grid.nodes
        raise UsageError(
            f"--nodes {arguments.nodes}: {len(grid.live)} of the {rows} x {columns} nodes of "
            f"--topology {arguments.topology} are left; expected at most as many"
        )


def _cost(
    arguments: argparse.Namespace, the_model: Model, layout: Layout, joined: str | Topology
) -> Cost:
    here = argparse.Namespace(
        **{name: getattr(arguments, name, None) for name in ASSUMPTIONS},
        **dict.fromkeys(("cost_model", "layer_kinds", "host_memory_gib")),
        ep=arguments.ep,
        zero="1",  # training's
        model=the_model,
        device=arguments.device,
        memory_budget_gib=arguments.memory_budget_gib,
        tp=layout.tp,
    )
    here.topology = joined
    return machine.cost_of(here, pp=layout.pp, cp=layout.cp, dp=layout.dp, layers=None)


def _dry_run(
    first: Choice, batches: Batches, cost: Cost, options: Options, arguments: argparse.Namespace
) -> list[Choice]:
    """The first choice on so many batches, one after another as training would draw them."""
    numbers = range(arguments.dry_run_corpus)
    levers = options.levers | {"offload"} if first.offload else options.levers - {"offload"}
    options = dataclasses.replace(options, levers=levers)
    choices = []
    for number in bar(numbers, len(numbers), "iterations"):
        try:
            choices.append(
                choice_of(
                    *(first.layout, cost, first.layers, [batches[number]], options, first.planner),
                    cut=first.vocabulary_parallel,
                    place=first.place,
                )
            )
        except ValueError as error:
            raise ValueError(f"iteration {number} of {first.layout}: {error}") from error
    return choices


def _facts(result: Survey, top: int) -> dict:
    choices: Sequence[Choice] = result.choices[:top]
    return {
        "choices": [choice.facts() for choice in choices],
        "refused": {str(layout): why for layout, why in result.refused.items()},
        "bounded": [str(layout) for layout in result.bounded],
    }
