"""Where the ranks of a group lie, and how fast they exchange there.

Megatron numbers ranks tensor-parallel first, then context-parallel, then replicas, then stages
(order tp-cp-ep-dp-pp). So a tensor-parallel group lies side by side, the members of a
context-parallel one are ``tp`` devices apart, and those of a data-parallel one ``tp * cp``:

    node 0: | t0 t1 | t0 t1 | t0 t1 | t0 t1 |   tp 2, cp 4: the context-parallel groups are the
              c0      c1      c2      c3        devices 0 2 4 6 and 1 3 5 7

A group inside a node exchanges at the node's rate. One that crosses nodes shares every node's link
with all that lie there: of ``size`` members ``here`` on each node, each sends the share
(size - here) / size of its bytes away, at the rate that a device has of its node's link.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import sqrt

from megatron_epp.cost.catalogue.devices import MOST_DEVICES, Device
from megatron_epp.cost.catalogue.named import pick
from megatron_epp.cost.network.grid import HoledGrid, Link, Place
from megatron_epp.cost.network.rails import (
    ALL_TO_ALL,
    RINGS,
    TORUS,
    Dimension,
    all_to_all_rate,
    dimensions_of,
    members_in,
    ring_rate,
    shift_rate,
)
from megatron_epp.ir.errors import quoted, require_name

SWITCH, MESH, FAT_TREE = "switch", "mesh", "fat-tree"
_KNOWN = {"inside": (SWITCH, MESH), "between": (SWITCH, RINGS, ALL_TO_ALL, TORUS, FAT_TREE)}


@dataclass(frozen=True, slots=True)
class Topology:
    """How devices are joined to nodes, and nodes to each other.

    node_devices            of every node; 0: as many as the device says
    inside                  switch: every pair of a node at full rate. mesh: devices of a node stand
                            in a square, joined to their neighbours: half of what an all-to-all
                            moves crosses the middle of a k x k part over k links, so that it is k
                            times slower. Rings find their way through a mesh at full rate
    between                 switch: every pair of nodes at full rate. fat-tree: rail-optimised, the
                            devices of one rail at full rate, all others over the node's own links:
                            full rate, too. rings: circuit switches close a ring through the nodes
                            of every group, in its row and in its column. torus: a ring of every row
                            and column, which stays. all-to-all: rings of rails that join every pair
                            of nodes of a row or column. What they carry: ``rails.py``
    link_bytes_per_second   of a node, one direction, all rails; 0: as the device says
    nodes                   rows and columns of the grid; (): not known, the nodes of a group are
                            a row of their own
    rails                   rings that a node is on in its row, and as many in its column; 0: as
                            many as join every pair
    failed_nodes            their rows and columns, from 0
    failed_links            pairs of nodes whose link failed
    used                    rows and columns that a job takes of the grid; (): all
    hosts                   names of the nodes, row by row; (): none
    column_load             times that the busiest link of columns carries more than without holes,
                            as some nodes stand in for failed ones of other columns
    """

    name: str
    node_devices: int = 0
    inside: str = SWITCH
    between: str = SWITCH
    link_bytes_per_second: float = 0.0
    nodes: tuple[int, ...] = ()
    rails: int = 0
    failed_nodes: tuple[Place, ...] = ()
    failed_links: tuple[Link, ...] = ()
    used: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    column_load: float = 1.0

    def __post_init__(self):
        require_name("topology name", self.name)
        for field, known in _KNOWN.items():
            if getattr(self, field) not in known:
                raise ValueError(
                    f"{field} {quoted(getattr(self, field))}: expected {' or '.join(known)}"
                )
        devices = self.node_devices
        if (
            not isinstance(devices, int)
            or isinstance(devices, bool)
            or not (0 <= devices <= MOST_DEVICES)
        ):
            raise ValueError(f"node_devices {quoted(devices)}: expected from 0 to {MOST_DEVICES}")
        rate = self.link_bytes_per_second
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1e24:
            raise ValueError(f"link_bytes_per_second {quoted(rate)}: expected bytes a second, or 0")
        load = self.column_load
        if isinstance(load, bool) or not isinstance(load, int | float) or not 1 <= load <= 1e6:
            raise ValueError(f"column_load {quoted(load)}: expected at least 1")
        grid = HoledGrid.of(self)
        for name in grid.__slots__:  # lists of JSON, as tuples
            object.__setattr__(self, name, getattr(grid, name))
        self.dimensions(1.0)

    @property
    def grid(self) -> HoledGrid:
        """The grid of nodes, where it is known."""
        return HoledGrid.of(self)

    @property
    def hops(self) -> int:
        """Most links between two nodes of the grid; 1 where switches join them."""
        lines = chain.from_iterable(self.dimensions(1.0))
        return sum(1 if each.wiring == ALL_TO_ALL else each.nodes // 2 for each in lines) or 1

    def dimensions(self, link: float, alone: int = 0) -> list[list[Dimension]]:
        """Return how the nodes of a row and those of a column are joined, a node's ``link`` divided
        evenly; where there is no grid, ``alone`` nodes in a row. None: by switches."""
        if self.between in (SWITCH, FAT_TREE):
            return []
        rows, columns = self.nodes or (1, alone)
        sizes = [size for size in (columns, rows) if size > 1]
        need = max((size // 2 for size in sizes), default=1)
        each = link / max(1, len(sizes))
        rates = [each] if columns > 1 else []
        rates += [each / self.column_load] if rows > 1 else []
        return [
            dimensions_of(size, self.between, self.rails or need, rate)
            for size, rate in zip(sizes, rates, strict=True)
        ]


# `railx`: nodes that are meshes of directly joined devices, and rings of nodes through optical
# circuit switches, arranged so that every pair of nodes has a direct link. Source: RailX (arXiv
# 2507.18889). 4 x 4 devices: our choice, as the paper leaves the size open. Other grids: a file.
TOPOLOGIES: Mapping[str, Topology] = {
    each.name: each for each in (Topology("nodes"), Topology("railx", 16, MESH, ALL_TO_ALL))
}
FLAT = "flat"  # rates by a group's size alone, wherever it lies, tensor-parallel ones too


def topology(name: str) -> Topology | None:
    """The one called ``name``, or that the JSON file at ``name`` describes; None: ``flat``."""
    return None if name == FLAT else pick("topology", name, TOPOLOGIES, Topology)


@dataclass(frozen=True, slots=True)
class Network:
    """A topology of some device: the bytes per second that one device has in a group.

    inside_bytes_per_second   by group size, of an all-to-all inside a node
    across_bytes_per_second   by group size, of an all-to-all over whole nodes: what was measured
    ring_bytes_per_second     by group size, of gathers and scatters inside a node
    share_bytes_per_second    a device's of its node's link
    gather_latency_seconds    of a gather or scatter besides, by group size
    copy_bytes_per_second     of a device's own memory, where an all-to-all's rate is the wire's
                              alone; 0: copies are contained in it
    """

    topology: Topology
    node_devices: int
    inside_bytes_per_second: Mapping[int, float]
    across_bytes_per_second: Mapping[int, float]
    ring_bytes_per_second: Mapping[int, float]
    share_bytes_per_second: float
    gather_latency_seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    copy_bytes_per_second: float = 0.0

    @classmethod
    def of(cls, topology: Topology, device: Device) -> "Network":
        measured = device.node_devices
        rates = device.group_bytes_per_second
        inside = {size: rate for size, rate in rates.items() if size <= measured}
        inside = inside or {2: min(rates.values())}
        devices = topology.node_devices or measured
        # Measured across nodes: only where these nodes are those, and are joined as those were.
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
            inside,
            across if as_measured else {},
            dict(device.tensor_bytes_per_second) or inside,
            link / devices,
            device.gather_latency_seconds,
            device.memory_efficiency * device.memory_bytes_per_second,
        )

    def placed(self, size: int, stride: int) -> tuple[int, int]:
        """(members on each node, nodes) of a group whose members are ``stride`` devices apart."""
        here = max(1, min(size, self.node_devices // stride))
        return here, -(-size // here)

    def all_to_all(self, size: int, stride: int = 1) -> float:
        """Bytes per second of an all-to-all in a group of ``size``, ``stride`` devices apart."""
        here, nodes = self.placed(size, stride)
        if nodes == 1:
            rate = at_most(self.inside_bytes_per_second, size)
            rate = rate / sqrt(size) if self.topology.inside == MESH else rate
            return rate * size / (size - 1) if self.copy_bytes_per_second and size > 1 else rate
        leaves = (size - here) / size
        rate = self._away(nodes, stride) / leaves
        if here > 1:  # what stays goes beside it
            stays = self.all_to_all(here, stride) * size / here
            rate = min(rate, stays)
        return rate

    def _away(self, nodes: int, stride: int) -> float:
        """A device's part of its node's link in an all-to-all over so many nodes."""
        spanned = nodes * self.node_devices
        if self.across_bytes_per_second and spanned >= min(self.across_bytes_per_second):
            known = max(size for size in self.across_bytes_per_second if size <= spanned)
            return self.across_bytes_per_second[known] * (known - self.node_devices) / known
        dimensions, places = self._between(nodes, stride)
        return all_to_all_rate(dimensions, places) if places else self.share_bytes_per_second

    def _between(self, nodes: int, stride: int) -> tuple[list[Dimension], list[tuple[int, int]]]:
        """The dimensions of the grid, at a device's share of their rates, and where in them lie the
        ``nodes`` of a group whose members are ``stride`` devices apart; none: joined by switches.

        Raises:
            ValueError: that the grid has not so many nodes.
        """
        lines = self.topology.dimensions(self.share_bytes_per_second, nodes)
        if not lines:
            return [], []
        grid = self.topology.nodes or (1, nodes)
        used = [
            taken for taken, size in zip(self.topology.used or grid, grid, strict=True) if size > 1
        ]
        sizes: list[int] = []
        for line, size in zip(lines, reversed(used), strict=True):
            sizes += [size] if len(line) == 1 else [line[0].nodes, -(-size // line[0].nodes)]
        return list(chain.from_iterable(lines)), members_in(
            sizes, nodes, max(1, stride // self.node_devices)
        )

    def gather_latency(self, size: int) -> float:
        """Return the seconds that a gather or scatter takes whatever its bytes."""
        return at_most(self.gather_latency_seconds, size) if self.gather_latency_seconds else 0.0

    def copy_seconds(self, moved: float) -> float:
        """Return the seconds that a device's own copies of so many bytes take, before and after an
        exchange: each is read and written."""
        return 4 * moved / self.copy_bytes_per_second if self.copy_bytes_per_second else 0.0

    def dispatch_seconds(self, copy: float, copies: int, size: int, once: bool) -> float:
        """Return the seconds of handing ``copies`` of a token, of so many bytes each, to experts on
        ``size`` devices; ``once``: one for each node and device that wants any."""
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
        """Bytes per second of gathers and scatters, as nccl-tests counts bus bandwidth: bytes *
        (size - 1) / size over seconds. A ring over nodes enters and leaves each once for all that
        it has there."""
        here, nodes = self.placed(size, stride)
        inside = at_most(self.ring_bytes_per_second, size)
        if nodes == 1:
            return inside
        dimensions, places = self._between(nodes, stride)
        rate = ring_rate(dimensions, places) if places else self.share_bytes_per_second
        return min(inside, here * rate)

    def to_neighbour(self, devices: int, replicas: int, stages: int) -> float:
        """Between two stages of ``devices`` each, all of them together. Stages are the outermost
        ranks: neighbours share a node only where all replicas' pipelines lie in one."""
        if devices * replicas * stages <= self.node_devices:
            return devices * at_most(self.ring_bytes_per_second, 2)
        if not self.topology.nodes or self.topology.between in (SWITCH, FAT_TREE):
            return devices * self.share_bytes_per_second
        apart = devices * replicas
        dimensions, _ = self._between(2, apart)
        return devices * shift_rate(dimensions, max(1, apart // self.node_devices))


def distinct(places: int, copies: int) -> float:
    """Return how many of so many places ``copies`` go to, if all are alike."""
    return places * (1 - (1 - 1 / places) ** copies)


def at_most(rates: Mapping[int, float], size: int) -> float:
    """The rate of the largest known size up to ``size``, or of the smallest."""
    if not rates:
        raise ValueError(f"no bandwidth is known for groups of {size}")
    return rates[max((known for known in rates if known <= size), default=min(rates))]
