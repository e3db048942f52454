"""Cost of failed nodes in a grid: seconds of an iteration around them, and without their rows.

    python scripts/bench/holes.py [--grids 8x8 32x32] [--failed 8] [--between all-to-all]
                                  [--model llama3-70b] [--seed 1] [-o RESULT.md]

Column best: the fastest layout that ``map_nodes`` can place on the remaining nodes. Column naive:
every row with a failed node is left out. Both use the same random nodes, one more in every line. A
batch of the same documents is planned by ``epp`` for the replica with the most work. A second table
shows the bandwidth and the parts of the networks of such grids. All numbers are simulated.
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from headline import ROOT, heading, host, write
from network_parts import network_parts

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.network.grid import Place
from megatron_epp.cost.network.rails import ALL_TO_ALL, RINGS, TORUS
from megatron_epp.cost.network.topology import FAT_TREE, MESH, Network, Topology
from megatron_epp.planner import Options
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.node_map import NodeMap, map_nodes
from megatron_epp.planner.tuning.survey import ELASTIC, choice_of
from megatron_epp.show.table import markdown

DEVICE, NODE_DEVICES, CONTEXT = "h100-80g", 16, 65536
DOCUMENTS_A_NODE = 8
# Of a replica's stage, which fill a node; and stages.
DEGREES = [(tp, NODE_DEVICES // tp, pp) for tp, pp in product((8, 16), (4, 5, 8, 10))]


def grid(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def placed(topology: Topology) -> Iterator[NodeMap]:
    """Yield, for each of DEGREES, the map with the most replicas on the remaining nodes."""
    for tp, cp, pp in DEGREES:
        for dp in range(len(topology.grid.live) // pp, 0, -1):
            try:
                yield map_nodes(topology, Layout(tp, cp, pp, dp), NODE_DEVICES)
            except ValueError:
                continue
            break


class Predictions:
    """Predicted seconds of an iteration, by layout and by the part of the grid that it uses."""

    def __init__(self, model: str, documents: int):
        self.model = model
        self.lengths = open_corpus("wlb", CONTEXT).batch(0, documents)
        self.seconds = cache(self._seconds)

    def _seconds(self, layout: Layout, topology: Topology) -> float:
        cost = named_cost(
            self.model,
            DEVICE,
            **{name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp")},
            **AS_TRAINED | {"topology": topology},
        )
        options = Options(CONTEXT, effort=0)
        layers = cost.layout.layers
        return choice_of(layout, cost, layers, [self.lengths], options, ELASTIC).seconds

    def fastest(self, topology: Topology) -> tuple[float, NodeMap]:
        known = []
        for mapped in placed(topology):
            try:
                known.append((self.seconds(mapped.layout, mapped.topology), mapped))
            except ValueError:  # it does not fit
                continue
        if not known:
            raise ValueError(
                f"{len(topology.grid.live)} nodes are left, which no layout of {self.model} with "
                f"{min(pp for _, _, pp in DEGREES)} stages or more fills; expected larger --grids, "
                "or fewer --failed"
            )
        return min(known, key=seconds_of)


def hole_rows(
    size: tuple[int, int], most: int, between: str, model: str, seed: int
) -> Iterator[list[str]]:
    """Yield the rows of the table for one grid, one per number of failed nodes."""
    rows, columns = size
    predictions = Predictions(model, DOCUMENTS_A_NODE * rows * columns)
    everyone: list[Place] = list(product(range(rows), range(columns)))
    if not 0 <= most < len(everyone):
        raise ValueError(f"--failed {most}: expected from 0 to {len(everyone) - 1}")
    drawn = random.Random(seed).sample(everyone, most)
    topology = Topology("grid", NODE_DEVICES, MESH, between, nodes=size)
    around: dict[int, tuple[float, NodeMap]] = {}
    without: dict[int, tuple[float, NodeMap]] = {}
    for failed in range(most, -1, -1):
        holes = drawn[:failed]
        dropped = {row for row, _ in holes}
        gone = tuple(place for place in everyone if place[0] in dropped)
        for known, nodes in ((around, tuple(holes)), (without, gone)):
            ways = [predictions.fastest(dataclasses.replace(topology, failed_nodes=nodes))]
            ways += known.values()  # a map around more holes is one around these
            known[failed] = min(ways, key=seconds_of)
    full = seconds_of(around[0])
    for failed in range(most + 1):
        row = [f"{rows * columns}", f"{failed}"]
        for seconds, mapped in (around[failed], without[failed]):
            row += [f"{len(mapped.nodes)}", f"{mapped.layout}"]
            row += [f"{seconds:.2f}", f"{seconds / full:.3f}"]
        yield row


def seconds_of(way: tuple[float, NodeMap]) -> float:
    return way[0]


def network_rows(size: tuple[int, int]) -> Iterator[list[str]]:
    """Yield the rows of the network table for one grid; the unit is a node's link."""
    nodes = size[0] * size[1]
    for between in (FAT_TREE, TORUS, RINGS, ALL_TO_ALL):
        topology = Topology("grid", 1, "switch", between, 1.0, nodes=size)
        network = Network.of(topology, device(DEVICE))
        parts = network_parts(topology)
        leave = network.all_to_all(nodes) * (nodes - 1) / nodes
        yield [
            f"{size[0]} x {size[1]}",
            between,
            f"{topology.hops}",
            f"{leave:.3f}",
            f"{network.ring(nodes):.3f}",
            f"{parts.transceivers}",
            f"{parts.packet_ports}",
            f"{parts.circuit_ports}",
        ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--grids", nargs="+", type=grid, default=[(8, 8), (32, 32)])
    parser.add_argument("--failed", type=int, default=8, help="most nodes that failed")
    parser.add_argument("--between", default=ALL_TO_ALL, help="how nodes are joined")
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--seed", type=int, default=1, help="of the nodes that fail")
    parser.add_argument("-o", "--output", help="append the tables to this file")
    arguments = parser.parse_args(words)
    how = arguments.failed, arguments.between, arguments.model, arguments.seed
    try:
        table = [row for size in arguments.grids for row in hole_rows(size, *how)]
    except ValueError as error:
        parser.error(str(error))
    head = ("nodes", "failed", "best: nodes", "layout", "seconds", "times")
    head += ("naive: nodes", "layout", "seconds", "times")
    networks = [row for size in arguments.grids for row in network_rows(size)]
    parts = ("nodes", "between", "hops", "all-to-all", "ring", "transceivers", "packet ports")
    parts += ("circuit ports",)
    text = (
        heading(f"Simulated ({DEVICE}, nodes of {NODE_DEVICES}, {arguments.between}); {host()}")
        + markdown(head, table)
        + "\nTimes: of the seconds without a failed node.\n\n"
        + markdown(parts, networks)
        + "\nRates: of a node's link. Hops: most links between two nodes. Parts: for one port of a "
        "node.\n"
    )
    print(text, end="")
    write(arguments.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
