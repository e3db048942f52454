"""The job whose layouts ``tune`` searches: model, devices, nodes and topology."""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.cli import machine
from megatron_epp.cli.flags import ASSUMPTIONS
from megatron_epp.cli.options import UsageError
from megatron_epp.cost.catalogue.devices import DEVICES, Device, device
from megatron_epp.cost.catalogue.hub_file import HubConfig
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.network.topology import FLAT, Topology, topology
from megatron_epp.planner.tuning.layouts import JobRequest, Layout, layouts
from megatron_epp.planner.tuning.survey import Choice


@dataclass(frozen=True, slots=True)
class TunedJob:
    """A model on a number of devices.

    Attributes:
        arguments: options of the command.
        model: shape of the model.
        config: contents of config.json other than the shape; None without a config.json.
        device: kind of the devices.
        nodes: number of nodes.
        node_devices: number of devices of a node.
        joined: topology of the network between devices.
        batches: document lengths that determine the padding of chunks; () for no padding.
    """

    arguments: argparse.Namespace
    model: Model
    config: HubConfig | None
    device: Device
    nodes: int
    node_devices: int
    joined: str | Topology
    batches: Sequence[Sequence[int]] = ()

    @property
    def devices(self) -> int:
        """Number of devices of the job."""
        return self.nodes * self.node_devices

    @property
    def host_devices(self) -> int:
        """Number of devices of a host; a node may have several hosts."""
        return self.device.devices_of_a_host(self.node_devices)

    def __str__(self) -> str:
        nodes = "" if self.nodes == 1 else f"{self.nodes} nodes of "
        return f"{nodes}{self.node_devices} x {self.device.name}"

    def layouts(self, documents: int) -> list[Layout]:
        """Return the layouts that the options allow, for a global batch of ``documents``."""
        here = self.arguments
        pp = here.pp
        # one budget for every pipeline rank
        if pp is None and len(here.memory_budget_gib or ()) > 1:
            pp = len(here.memory_budget_gib)
        wanted = JobRequest(here.tp, here.cp, pp, here.dp, here.ep)
        return list(layouts(self.model, self.devices, self.node_devices, documents, wanted))

    def cost_for(self, layout: Layout) -> Cost:
        """Return the cost model of a layout whose stages differ by at most one layer.

        Raises:
            ValueError: if the layout cannot run.
        """
        here = argparse.Namespace(
            **{name: getattr(self.arguments, name, None) for name in ASSUMPTIONS},
            **dict.fromkeys(("cost_model", "layer_kinds")),
            host_memory_gib=getattr(self.arguments, "host_memory_gib", None),
            ep=layout.ep or self.arguments.ep,
            zero="1",  # as in training
            model=self.model,
            device=self.arguments.device,
            memory_budget_gib=self.arguments.memory_budget_gib,
            tp=layout.tp,
        )
        here.topology = self.joined
        cost = machine.cost_of(here, pp=layout.pp, cp=layout.cp, dp=layout.dp, layers=None)
        if not self.batches:
            return cost
        return machine.with_padding(cost, self.arguments, self.batches, layout.dp)

    def mfu(self, choice: Choice, batches: Sequence[Sequence[int]]) -> float | None:
        """Return the model FLOPs utilization without recompute; None if the peak is unknown."""
        if not self.device.peak_flops:
            return None
        flops = sum(map(self.model.training_flops, batches)) / len(batches)
        return flops / (self.device.peak_flops * self.devices * choice.seconds)


def job_of(
    arguments: argparse.Namespace, model: Model, config: HubConfig | None, gpus: int | None
) -> TunedJob:
    """Return the job that the options name.

    Args:
        arguments: options of the command.
        model: shape of the model.
        config: contents of config.json other than the shape; None without a config.json.
        gpus: number of devices; None if --nodes gives the number of nodes.

    Raises:
        UsageError: if an option is missing, contradicts another option, or is not supported.
        ValueError: if the device or the topology is unknown.
    """
    if arguments.device is None:
        raise UsageError(
            f"--device is missing; expected one of {', '.join(DEVICES)}, or a JSON file"
        )
    if model.mtp_layers_count:
        raise UsageError(
            f"{model.name} has multi-token prediction, of which the settings that are printed say "
            "nothing; tune it without, or compare layouts with `compare`"
        )
    the_device = device(arguments.device)
    node_devices = arguments.devices_per_node or the_device.node_devices
    nodes = arguments.nodes
    if gpus is not None:
        if nodes is not None:
            raise UsageError(
                f"--gpus {gpus}: is nodes x devices of a node; leave --nodes {nodes} out, or --gpus"
            )
        if gpus > node_devices and gpus % node_devices:
            raise UsageError(
                f"--gpus {gpus}: no whole number of nodes of {node_devices} devices; expected a "
                "multiple, or --devices-per-node"
            )
        nodes, node_devices = max(1, gpus // node_devices), min(gpus, node_devices)
    if nodes is None:
        raise UsageError("--gpus is missing; expected the number of devices (or --nodes)")
    joined = _joined(arguments, node_devices)
    job = TunedJob(arguments, model, config, the_device, nodes, node_devices, joined)
    if node_devices % job.host_devices:
        raise UsageError(
            f"{node_devices} devices of a node: no whole number of hosts, which have "
            f"{job.host_devices} {the_device.name}; expected a multiple"
        )
    _require_grid(job)
    return job


def _joined(arguments: argparse.Namespace, node_devices: int) -> str | Topology:
    """Return the topology that --topology names, with nodes of ``node_devices`` devices."""
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


def _require_grid(job: TunedJob) -> None:
    """Raise a UsageError if an option needs a grid of hosts, or the grid has too few live nodes."""
    arguments, joined, nodes = job.arguments, job.joined, job.nodes
    grid = joined if isinstance(joined, Topology) and joined.nodes else None
    if grid is None:
        if arguments.hostfile is not None:
            raise UsageError(
                "--hostfile: expected a --topology file that has nodes, the rows and columns of a "
                "grid"
            )
        return
    hosts = job.node_devices // job.host_devices
    if hosts > 1 and (arguments.hostfile or (arguments.script and grid.hosts)):
        raise UsageError(
            f"--topology {arguments.topology}: names nodes, each of {hosts} hosts of "
            f"{job.host_devices} {job.device.name}; leave --hostfile and the file's hosts out"
        )
    if nodes > len(grid.live):
        rows, columns = grid.nodes
        raise UsageError(
            f"--nodes {nodes}: {len(grid.live)} of the {rows} x {columns} nodes of "
            f"--topology {arguments.topology} are left; expected at most as many"
        )
