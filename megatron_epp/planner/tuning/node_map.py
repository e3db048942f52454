"""Assignment of ranks to the nodes of a grid, avoiding failed nodes.

Ranks are numbered tensor-parallel first, then context-parallel, data-parallel and
pipeline-parallel. torchrun numbers the ranks node by node, so the order of the nodes determines the
whole map. The nodes of a job form rows of equal width. A *block* is the set of nodes of one
replica's stage, or the nodes over which a layer's experts are sharded. A block lies within one row
or fills several rows. The rows depend on the topology of the network:

    all-to-all   rows with enough live nodes. If a node of a row has failed, another node of the
                 row replaces it. Traffic in its column then takes one more hop (``column_load``)
    switch       all live nodes form one row
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, permutations

import numpy as np

from megatron_epp.cost.network.rails import matched_pairs
from megatron_epp.cost.network.topology import SWITCH, Place, Topology
from megatron_epp.planner.tuning.layouts import Layout


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows and columns selected from a grid of nodes; ``live`` marks the nodes that work.

    Another live node of the same row replaces a selected node that has failed. The last row has
    ``last`` live nodes that can be used, perhaps fewer than other rows. If ``transposed``, the
    rows are columns of the grid.
    """

    live: np.ndarray
    rows: list[int]
    columns: list[int]
    last: int
    transposed: bool = False

    def held(self, width: int, together: int) -> int:
        """Return how many nodes rows of ``width`` can hold, in full blocks of ``together``."""
        last = min(self.last, width)
        if together <= width:
            last -= last % together
        return ((len(self.rows) - 1) * width + last) // together * together

    def displaced(self, nodes: int, width: int) -> int:
        """Return the number of failed nodes among the first ``nodes`` selected nodes."""
        full, rest = divmod(nodes, width)
        columns = self.columns[:width]
        holes = int((~self.live[np.ix_(self.rows[:full], columns)]).sum())
        return holes + (int((~self.live[self.rows[full], columns[:rest]]).sum()) if rest else 0)

    def _upright(self, nodes: int, width: int) -> list[Place]:
        """Return the (row, column) of the first ``nodes`` nodes, ignoring ``transposed``."""
        places: list[Place] = []
        for row in self.rows[: -(-nodes // width)]:
            columns = self.columns[: min(width, nodes - len(places))]
            free = np.flatnonzero(self.live[row]).tolist()
            others = (column for column in free if column not in columns)
            at = [column if self.live[row, column] else next(others) for column in columns]
            places += [(row, column) for column in at]
        return places

    def places(self, nodes: int, width: int) -> list[Place]:
        """Return the (row, column) on the grid of the first ``nodes`` nodes, row by row."""
        upright = self._upright(nodes, width)
        return [(column, row) for row, column in upright] if self.transposed else upright

    def column_load(self, nodes: int, width: int, topology: Topology) -> float:
        """Return the load of the busiest link if every two nodes of a column exchange one byte.

        The load is bytes over bandwidth, relative to a direct link in a column; it is 1 without
        failed nodes. A replacement may be in another grid column. Its traffic then takes two links
        through a node in the row of one end and the column of the other end. Two such live nodes
        share the traffic; without any, it is split evenly over all routes of three links.
        """
        places, live = self._upright(nodes, width), self.live
        load: defaultdict[tuple[Place, Place], float] = defaultdict(float)
        for column in range(width):
            for one, other in permutations(places[column::width], 2):
                (row, at), (to_row, to) = one, other
                if at == to:
                    load[one, other] += 1
                    continue
                ways: list[tuple[Place, ...]] = []
                ways += [(each,) for each in ((to_row, at), (row, to)) if live[each]]
                if not ways:
                    ways = [((row, by), (to_row, by)) for by in range(live.shape[1])]
                    ways += [((by, at), (by, to)) for by in range(live.shape[0])]
                    ways = [way for way in ways if live[way[0]] and live[way[1]]]
                for way in ways:
                    for link in pairwise((one, *way, other)):
                        load[link] += 1 / len(ways)
        lines = topology.dimensions(1.0)[:: -1 if self.transposed else 1]
        doubled = [set(map(frozenset, matched_pairs(line.nodes))) for line in lines]

        def rate(link: tuple[Place, Place]) -> float:
            (row, at), (to_row, to) = link
            which, ends = (0, {at, to}) if row == to_row else (1, {row, to_row})
            rails = 2 if ends in doubled[which] else 1
            return rails * lines[which].pair_bytes_per_second / lines[1].pair_bytes_per_second

        return max([1.0, *(carried / rate(link) for link, carried in load.items())])


@dataclass(frozen=True, slots=True)
class NodeMap:
    """Assignment of a job's ranks to the nodes of a topology.

    Attributes:
        layout: parallel degrees of the job.
        node_devices: number of ranks of a node.
        grid: topology with all its nodes, failed ones included.
        nodes: (row, column) of the nodes that have ranks; nodes[i] has ``node_devices`` ranks, from
            i * node_devices on, but the last node may have fewer.
        spares: (row, column) of live nodes without ranks.
        topology: the part of the topology that the job uses, without failed nodes.
        displaced: number of nodes that replace a failed node of another column.
    """

    layout: Layout
    node_devices: int
    grid: Topology
    nodes: tuple[Place, ...]
    spares: tuple[Place, ...]
    topology: Topology
    displaced: int

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes in the order of their ranks, for the lines of SLURM_HOSTFILE."""
        return tuple(map(self.grid.host, self.nodes))

    def stages_and_replicas(self, node_rank: int) -> tuple[range, range]:
        """Return the stages and the replicas that have ranks on node ``node_rank``."""
        one = self.layout.tp * self.layout.cp
        last_rank = one * self.layout.dp * self.layout.pp - 1
        first = node_rank * self.node_devices
        last = min(first + self.node_devices - 1, last_rank)
        stages = range(first // (one * self.layout.dp), last // (one * self.layout.dp) + 1)
        if len(stages) > 1:
            return stages, range(self.layout.dp)
        replica_of = [rank // one % self.layout.dp for rank in (first, last)]
        return stages, range(replica_of[0], replica_of[1] + 1)

    def labels(self) -> dict[Place, str]:
        """Return the label "stages.replicas" of every node with ranks."""
        return {
            place: ".".join(
                f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}"
                for each in self.stages_and_replicas(node_rank)
            )
            for node_rank, place in enumerate(self.nodes)
        }


def map_nodes(topology: Topology, layout: Layout, node_devices: int, ep: int = 1) -> NodeMap:
    """Map the ranks of a layout to live nodes of the topology's grid.

    Args:
        topology: topology whose ``nodes`` are the rows and columns of its grid.
        layout: parallel degrees; their product is the number of ranks.
        node_devices: number of ranks of a node.
        ep: number of devices over which a layer's experts are sharded.

    Raises:
        ValueError: if the live nodes cannot hold the layout's groups, or the size of a group is
            neither a divisor nor a multiple of ``node_devices``.
    """
    block = max(layout.tp * layout.cp, ep)
    if block % node_devices and node_devices % block:
        raise ValueError(
            f"{layout}: groups of {block} ranks over nodes of {node_devices}; expected a divisor "
            "or a multiple"
        )
    ranks = layout.tp * layout.cp * layout.dp * layout.pp
    wanted = -(-ranks // node_devices)
    together = max(1, block // node_devices)
    # distance between consecutive stages, in nodes
    apart = layout.tp * layout.cp * layout.dp // node_devices
    most, best = 0, None
    for rows in _usable_rows(topology):
        columns = len(rows.columns)
        width = next(w for w in range(columns, 0, -1) if w % together == 0 or together % w == 0)
        held = rows.held(width, together)
        most = max(most, held)
        if held < wanted:
            continue
        aligned = not apart or apart % width == 0 or width % apart == 0
        score = (not aligned, rows.displaced(wanted, width), rows.transposed, -width)
        if best is None or score < best[0]:
            best = score, rows, width
    if best is None:
        size = topology.nodes[0] * topology.nodes[1]
        raise ValueError(
            f"{layout}: takes {wanted} nodes, {together} next to each other in a row; "
            f"{topology.name} has {len(topology.live)} of {size} nodes left, "
            f"which hold {most} so; expected a layout of at most as many"
        )
    (_, displaced, *_), rows, width = best
    nodes = rows.places(wanted, width)
    load = rows.column_load(wanted, width, topology) if displaced else 1.0
    if topology.between == SWITCH:
        nodes = [divmod(at, topology.nodes[1]) for _, at in nodes]
    having = set(nodes)
    used_topology = replace(
        topology,
        nodes=topology.nodes[:: -1 if rows.transposed else 1],
        used=() if topology.between == SWITCH else (-(-wanted // width), width),
        column_load=load,
        failed_nodes=(),
        hosts=(),
    )
    return NodeMap(
        layout,
        node_devices,
        topology,
        tuple(nodes),
        tuple(place for place in topology.live if place not in having),
        used_topology,
        displaced,
    )


@lru_cache(maxsize=64)
def _usable_rows(topology: Topology) -> tuple[_Rows, ...]:
    """Return the ways to select rows of equal width from the grid."""
    live = np.ones(topology.nodes, bool)
    for place in topology.failed_nodes:
        live[place] = False
    if topology.between == SWITCH:
        row = live.reshape(1, -1)
        left = np.flatnonzero(row[0]).tolist()
        return (_Rows(row, [0], left, len(left)),)  # the live nodes in the grid's order
    return (*_standing_in(live, False), *_standing_in(live.T, True))


def _standing_in(live: np.ndarray, transposed: bool) -> Iterator[_Rows]:
    """Yield, for every width, the rows with at least that many live nodes, and as many columns.

    The columns are those with the most live nodes. If some rows have fewer live nodes than the
    width, the fullest of these rows is the last row.
    """
    counts = live.sum(axis=1)
    for width in range(int(counts.max()), 0, -1):
        chosen = np.flatnonzero(counts >= width)
        holes = (~live[chosen]).sum(axis=0)
        columns = np.sort(np.argsort(holes, kind="stable")[:width])
        fewest = np.argsort((~live[np.ix_(chosen, columns)]).sum(axis=1), kind="stable")
        rows, last = chosen[fewest].tolist(), width
        if len(chosen) < len(live):  # one row with fewer live nodes, for the last nodes of the job
            rows.append(int(np.argmax(np.where(counts < width, counts, -1))))
            last = int(counts[rows[-1]])
        yield _Rows(live, rows, columns.tolist(), last, transposed)
