"""Topologies: where the ranks of a group are, and how fast they communicate.

Megatron numbers ranks tensor-parallel first, then context-parallel, then replicas, then stages
(order tp-cp-ep-dp-pp). Members of a tensor-parallel group are therefore adjacent. Members of a
context-parallel group are ``tp`` devices apart, those of a data-parallel group are ``tp * cp``
devices apart:

    node 0: | t0 t1 | t0 t1 | t0 t1 | t0 t1 |   tp 2, cp 4: the context-parallel groups are the
              c0      c1      c2      c3        devices 0 2 4 6 and 1 3 5 7

A group inside a node communicates at the node's rate. If groups span several nodes, all devices of
a node share its link. If ``here`` of the ``size`` members of a group are on each node, each member
sends the fraction (size - here) / size of its bytes to other nodes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from megatron_epp.cost.catalogue.devices import MOST_DEVICES, Device, require_number
from megatron_epp.cost.catalogue.named import pick
from megatron_epp.cost.network.rails import (
    Dimension,
    all_to_all_rate,
    members_in,
    ring_rate,
    shift_rate,
)
from megatron_epp.ir.errors import quoted, require_name

SWITCH, MESH, ALL_TO_ALL = "switch", "mesh", "all-to-all"
MOST_NODES = 1 << 16
Place = tuple[int, int]  # row, column
_KNOWN = {"inside": (SWITCH, MESH), "between": (SWITCH, ALL_TO_ALL)}


@dataclass(frozen=True, slots=True)
class Topology:
    """How devices are joined within nodes, and nodes to each other.

    Attributes:
        name: name on the command line.
        node_devices: number of devices of a node; 0: as in the device's description.
        inside: "switch": every pair of devices in a node has the full rate. "mesh": devices of a
            node form a square and link to their neighbours. Half of an all-to-all's bytes cross the
            middle of a k x k square over k links, so an all-to-all is k times slower; rings have
            the full rate.
        between: how nodes are joined. "switch": every pair has the full rate. "all-to-all": rail
            rings that join every pair of nodes of a row or column; for the rates see ``rails.py``.
        link_bytes_per_second: rate of a node in one direction, over all rails; 0: as in the
            device's description.
        nodes: rows and columns of the grid. Empty: unknown; each group's nodes count as one row.
        failed_nodes: (row, column) of each failed node, counted from 0, or its name in ``hosts``.
        used: number of rows and of columns of the grid that a job uses; empty: all.
        hosts: names of the nodes, row by row; empty: none.
        column_load: load of the busiest link in a column, relative to a grid without failures. It
            exceeds 1 if nodes replace failed nodes of other columns.

    Raises:
        ValueError: a field is invalid, or fields contradict each other.
    """

    name: str
    node_devices: int = 0
    inside: str = SWITCH
    between: str = SWITCH
    link_bytes_per_second: float = 0.0
    nodes: tuple[int, ...] = ()
    failed_nodes: tuple[Place, ...] = ()
    used: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    column_load: float = 1.0

    def __post_init__(self):
        require_name("topology name", self.name)
        for field, known in _KNOWN.items():
            if (value := getattr(self, field)) not in known:
                raise ValueError(f"{field} {quoted(value)}: expected {' or '.join(known)}")
        require_number("node_devices", self.node_devices, 0, MOST_DEVICES, integer=True)
        require_number("link_bytes_per_second", self.link_bytes_per_second, 0, 1e24)
        require_number("column_load", self.column_load, 1, 1e6)
        for field in ("nodes", "failed_nodes", "used", "hosts"):
            if not isinstance(value := getattr(self, field), list | tuple):
                raise ValueError(f"{field} {quoted(value)}: expected a list")
            if value and not self.nodes:
                raise ValueError(f"{field}: expected nodes, the rows and columns of the grid")
            object.__setattr__(self, field, tuple(value))
        if self.nodes:
            self._check_grid()

    def _check_grid(self) -> None:
        """Check the grid's sizes and hosts; replace names of failed nodes by rows and columns."""
        for field, most in (("nodes", (MOST_NODES, MOST_NODES)), ("used", self.nodes)):
            sizes = getattr(self, field)
            if field == "used" and not sizes:
                continue
            if len(sizes) != 2:
                raise ValueError(f"{field} {quoted(list(sizes))}: expected [rows, columns]")
            for what, size, limit in zip(("rows", "columns"), sizes, most, strict=True):
                require_number(f"{field}: {what}", size, 1, limit, integer=True)
        rows, columns = self.nodes
        if rows * columns > MOST_NODES:
            raise ValueError(f"nodes {list(self.nodes)}: expected at most {MOST_NODES} in all")
        if self.hosts and len(self.hosts) != rows * columns:
            raise ValueError(
                f"hosts: {len(self.hosts)} names; expected {rows * columns}, one for every node of "
                f"{rows} x {columns}"
            )
        for number, name in enumerate(self.hosts):
            require_name(f"hosts[{number}]", name)
            if any(each.isspace() for each in name):
                raise ValueError(f"hosts[{number}] {quoted(name)}: expected a name without blanks")
        _require_once("hosts", self.hosts, self.hosts)
        failed = tuple(self._place(*entry) for entry in enumerate(self.failed_nodes))
        _require_once("failed_nodes", failed, self.failed_nodes)
        if len(failed) == rows * columns:
            raise ValueError(f"failed_nodes: all {len(failed)} nodes failed; expected one at least")
        object.__setattr__(self, "failed_nodes", failed)

    def _place(self, number: int, value: Any) -> Place:
        """Return the failed node that entry ``number`` names, by row and column or by host name."""
        rows, columns = self.nodes
        if isinstance(value, str) and value in self.hosts:
            row, column = divmod(self.hosts.index(value), columns)
            return row, column
        if isinstance(value, list | tuple) and [type(each) for each in value] == [int, int]:
            row, column = value
            if 0 <= row < rows and 0 <= column < columns:
                return row, column
        names = "a name of hosts, or " if self.hosts else ""
        raise ValueError(
            f"failed_nodes[{number}] {quoted(value)}: there is no such node; expected "
            f"{names}[row, column] from [0, 0] to [{rows - 1}, {columns - 1}]"
        )

    @property
    def live(self) -> list[Place]:
        """Nodes of the grid that have not failed, row by row."""
        failed, (rows, columns) = set(self.failed_nodes), self.nodes
        every = ((row, column) for row in range(rows) for column in range(columns))
        return [place for place in every if place not in failed]

    def host(self, place: Place) -> str:
        """Return the host name of ``place``, or its row and column if hosts have no names."""
        row, column = place
        return (
            self.hosts[row * self.nodes[1] + column] if self.hosts else f"row{row}-column{column}"
        )

    def dimensions(self, link: float, alone: int = 0) -> list[Dimension]:
        """Return the dimensions of a row, and of a column; empty if switches join the nodes.

        A dimension of one node is left out.

        Args:
            link: bytes per second of a node, divided evenly over row and column.
            alone: number of nodes of the single row if the grid is unknown.
        """
        if self.between == SWITCH:
            return []
        rows, columns = self.nodes or (1, alone)
        lines = [(columns, 1.0), (rows, self.column_load)]
        lines = [(size, load) for size, load in lines if size > 1]
        rails = max((size // 2 for size, _ in lines), default=1)
        return [Dimension(size, rails, link / len(lines) / load) for size, load in lines]


def _require_once(field: str, values: Sequence[object], entries: Sequence[Any]) -> None:
    """Raise a ValueError, which shows its entry, if one of ``values`` comes twice."""
    for number, value in enumerate(values):
        if (first := values.index(value)) != number:
            raise ValueError(
                f"{field}[{number}] {quoted(entries[number])}: is there twice, first as "
                f"{field}[{first}]; expected each once"
            )


# `railx`: nodes are meshes of directly joined devices. Rings of nodes go through optical circuit
# switches, so that every pair of nodes has a direct link. Source: RailX (arXiv 2507.18889). The
# paper leaves the size open; 4 x 4 devices is this project's choice. A file describes other grids.
TOPOLOGIES: Mapping[str, Topology] = {
    each.name: each for each in (Topology("nodes"), Topology("railx", 16, MESH, ALL_TO_ALL))
}
FLAT = "flat"  # rates depend on a group's size alone, tensor-parallel groups included


def topology(name: str) -> Topology | None:
    """Return the topology named ``name`` or in the JSON file at ``name``; None for ``flat``."""
    return None if name == FLAT else pick("topology", name, TOPOLOGIES, Topology)


@dataclass(frozen=True, slots=True)
class Network:
    """Topology with rates: bytes per second of one device in collectives of a group.

    Attributes:
        topology: how devices and nodes are joined.
        node_devices: number of devices of a node.
        host_devices: number of devices of a host; less than ``node_devices`` if a node (an NVLink
            domain) consists of several hosts.
        inside_bytes_per_second: rates of an all-to-all inside a node, by group size; of bytes that
            leave the device if ``copy_bytes_per_second`` is set, else of all bytes.
        across_bytes_per_second: measured rates of an all-to-all over whole nodes, by group size.
        ring_bytes_per_second: rates of gathers and scatters inside a node, by group size.
        share_bytes_per_second: one device's fraction of the rate of its node's link.
        gather_latency_seconds: latency of a gather or scatter, by group size.
        copy_bytes_per_second: rate of a device's memory, at which it copies before and after an
            all-to-all; 0: the all-to-all rates include these copies.
    """

    topology: Topology
    node_devices: int
    host_devices: int
    inside_bytes_per_second: Mapping[int, float]
    across_bytes_per_second: Mapping[int, float]
    ring_bytes_per_second: Mapping[int, float]
    share_bytes_per_second: float
    gather_latency_seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    copy_bytes_per_second: float = 0.0

    @classmethod
    def of(cls, topology: Topology, device: Device) -> "Network":
        """Return the network of devices like ``device`` in ``topology``."""
        measured = device.node_devices
        rates = device.group_bytes_per_second
        inside = {size: rate for size, rate in rates.items() if size <= measured}
        inside = inside or {2: min(rates.values())}
        devices = topology.node_devices or measured
        # Measurements across nodes apply only to nodes of the same size that are joined in the same
        # way.
        as_measured = (
            devices == measured
            and topology.between == SWITCH
            and not topology.link_bytes_per_second
        )
        across = {size: rate for size, rate in rates.items() if size > measured}
        link = topology.link_bytes_per_second or device.link_bytes_per_second
        return cls(
            topology,
            devices,
            device.devices_of_a_host(devices),
            inside,
            across if as_measured else {},
            dict(device.tensor_bytes_per_second) or inside,
            link / devices,
            device.gather_latency_seconds,
            device.memory_efficiency * device.memory_bytes_per_second,
        )

    def placed(self, size: int, stride: int) -> tuple[int, int]:
        """Return (members on each node, number of nodes) of ``size`` members ``stride`` apart."""
        here = max(1, min(size, self.node_devices // stride))
        return here, -(-size // here)

    def all_to_all(self, size: int, stride: int = 1) -> float:
        """Return a device's bytes per second in an all-to-all of a group; see :meth:`placed`."""
        here, nodes = self.placed(size, stride)
        if nodes == 1:
            rate = at_most(self.inside_bytes_per_second, size)
            rate = rate / sqrt(size) if self.topology.inside == MESH else rate
            return rate * size / (size - 1) if self.copy_bytes_per_second and size > 1 else rate
        leaves = (size - here) / size
        rate = self._away(nodes, stride) / leaves
        if here > 1:  # transfers inside the node run concurrently
            stays = self.all_to_all(here, stride) * size / here
            rate = min(rate, stays)
        return rate

    def _away(self, nodes: int, stride: int) -> float:
        """Return a device's rate on its node's link in an all-to-all over ``nodes`` nodes."""
        spanned = nodes * self.node_devices
        if self.across_bytes_per_second and spanned >= min(self.across_bytes_per_second):
            known = max(size for size in self.across_bytes_per_second if size <= spanned)
            return self.across_bytes_per_second[known] * (known - self.node_devices) / known
        dimensions, members = self._between(nodes, stride)
        return all_to_all_rate(dimensions, members) if members else self.share_bytes_per_second

    def _between(self, nodes: int, stride: int) -> tuple[list[Dimension], list[int]]:
        """Return the grid's dimensions, at a device's rates, and a group's members in each of them.

        Both lists are empty if switches join the nodes. The group is on ``nodes`` nodes, and its
        members are ``stride`` devices apart.

        Raises:
            ValueError: the grid has fewer nodes than the group needs.
        """
        lines = self.topology.dimensions(self.share_bytes_per_second, nodes)
        if not lines:
            return [], []
        rows, columns = self.topology.used or self.topology.nodes or (1, nodes)
        grid = self.topology.nodes or (1, nodes)
        used = [size for size, of in ((columns, grid[1]), (rows, grid[0])) if of > 1]
        return lines, members_in(used, nodes, max(1, stride // self.node_devices))

    def gather_latency(self, size: int) -> float:
        """Return the latency in seconds of a gather or scatter over ``size`` devices."""
        return at_most(self.gather_latency_seconds, size) if self.gather_latency_seconds else 0.0

    def copy_seconds(self, moved: float) -> float:
        """Return the seconds of a device's copies before and after exchanging ``moved`` bytes.

        Each of the two copies reads and writes all of these bytes. The result is 0 if the
        all-to-all rates include these copies.
        """
        return 4 * moved / self.copy_bytes_per_second if self.copy_bytes_per_second else 0.0

    def dispatch_seconds(self, copy: float, copies: int, size: int, once: bool) -> float:
        """Return the seconds of dispatching tokens to the experts on ``size`` devices.

        Args:
            copy: bytes that a device sends if it sends one copy of each of its tokens.
            copies: number of copies of each token, one for each expert that it chooses.
            size: expert-parallel size.
            once: whether each node or device receives a token at most once.

        Raises:
            ValueError: the grid has fewer nodes than the group needs.
        """
        here, nodes = self.placed(size, 1)
        inside = at_most(self.inside_bytes_per_second, min(size, here))
        sent = distinct(size, copies) if once else float(copies)
        seconds = copy * sent * (here - 1) / here / inside if here > 1 else 0.0
        if nodes > 1:
            leaving = distinct(nodes, copies) if once else float(copies)
            away = copy * leaving * (nodes - 1) / nodes / self._away(nodes, 1)
            seconds = max(seconds, away)
        return seconds

    def ring(self, size: int, stride: int = 1) -> float:
        """Return a device's bus bandwidth (bytes per second) in gathers and scatters.

        Bus bandwidth is counted as in nccl-tests: bytes * (size - 1) / size over seconds. A ring
        over several nodes enters and leaves a node once, for all members on the node. The group has
        ``size`` members; ``stride`` is the distance between the ranks of neighbouring members.

        Raises:
            ValueError: the grid has fewer nodes than the group needs.
        """
        here, nodes = self.placed(size, stride)
        inside = at_most(self.ring_bytes_per_second, size)
        if nodes == 1:
            return inside
        dimensions, members = self._between(nodes, stride)
        rate = ring_rate(dimensions, members) if members else self.share_bytes_per_second
        return min(inside, here * rate)

    def to_neighbour(self, devices: int, replicas: int, stages: int) -> float:
        """Return the bytes per second between two stages, summed over their ``devices``.

        Stages are the outermost dimension of ranks. Adjacent stages are therefore in one node only
        if that node contains all stages of all replicas.

        Raises:
            ValueError: the grid has fewer nodes than two stages need.
        """
        if devices * replicas * stages <= self.node_devices:
            return devices * at_most(self.ring_bytes_per_second, 2)
        if not self.topology.nodes or self.topology.between == SWITCH:
            return devices * self.share_bytes_per_second
        apart = devices * replicas
        dimensions, _ = self._between(2, apart)
        return devices * shift_rate(dimensions, max(1, apart // self.node_devices))


def distinct(places: int, copies: int) -> float:
    """Return the expected number of distinct values in ``copies`` draws among ``places`` values."""
    return places * (1 - (1 - 1 / places) ** copies)


def at_most(rates: Mapping[int, float], size: int) -> float:
    """Return the rate of the largest known size up to ``size``; if none, of the smallest size."""
    if not rates:
        raise ValueError(f"no bandwidth is known for groups of {size}")
    return rates[max((known for known in rates if known <= size), default=min(rates))]
