"""Which node of a grid has which ranks."""

import dataclasses
import random
from itertools import permutations, product

import pytest

from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.network.topology import Network, Place, Topology
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.node_map import NodeMap, map_nodes
from tests.cost.test_rails import LINK, busiest, grid_links

WIRINGS = ["all-to-all", "switch"]
PLACES = list(product(range(8), range(8)))
H100 = DEVICES["h100-80g"]


def grid(wiring: str, size: tuple[int, int], *failed: Place) -> Topology:
    return Topology("grid", 8, "switch", wiring, 0.0, size, failed)


def blocks(mapped: NodeMap, together: int) -> list[tuple[Place, ...]]:
    nodes = mapped.nodes
    return [nodes[first : first + together] for first in range(0, len(nodes), together)]


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_are_on_live_nodes_and_groups_are_whole(wiring: str, seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([(4, 4), (8, 8), (3, 7), (5, 2)])
    places = list(product(range(size[0]), range(size[1])))
    failed = chance.sample(places, chance.randrange(0, 4))
    topology = grid(wiring, size, *failed)
    for together, pp, dp in product((1, 2), (1, 2, 3), (1, 2, 4)):
        layout = Layout(8, together, pp, dp)
        try:
            mapped = map_nodes(topology, layout, 8)
        except ValueError as error:
            assert "expected a layout of at most" in str(error)
            continue
        assert len(mapped.nodes) == together * pp * dp == len(set(mapped.nodes))
        assert not set(mapped.nodes) & set(failed)
        assert sorted((*mapped.nodes, *mapped.spares)) == sorted(topology.live)
        if wiring == "all-to-all":
            for block in blocks(mapped, together):
                assert any(len({place[axis] for place in block}) == 1 for axis in (0, 1))
            rows, width = mapped.topology.used
            assert rows * width >= len(mapped.nodes) > (rows - 1) * width


def test_one_hole_costs_a_column_and_two_a_hop() -> None:
    """The naive map drops the row of every hole: 7 x 8 and 6 x 8 nodes."""
    one = map_nodes(grid("all-to-all", (8, 8), (3, 5)), Layout(8, 1, 8, 7), 8)
    assert one.topology.used == (8, 7) and one.displaced == 0
    assert {column for _, column in one.nodes} == set(range(8)) - {5}
    two = map_nodes(grid("all-to-all", (8, 8), (3, 5), (1, 2)), Layout(8, 1, 8, 7), 8)
    assert two.topology.used == (8, 7) and two.displaced == 1
    assert len(set(two.nodes)) == 56 and two.spares
    for row in range(8):  # every row of the map is of one row of the grid
        assert len({place[0] for place in two.nodes[7 * row : 7 * row + 7]}) == 1
    assert map_nodes(grid("switch", (8, 8), (3, 5), (1, 2)), Layout(8, 1, 2, 31), 8).spares == ()


def test_the_last_row_may_have_fewer_nodes() -> None:
    """Six rows of eight and one of seven, or seven of seven and one of six."""
    topology = grid("all-to-all", (8, 8), (0, 0), (0, 1), (1, 2))
    mapped = map_nodes(topology, Layout(8, 1, 5, 11), 8)
    rows, width = mapped.topology.used
    assert rows * width == 56 and len(set(mapped.nodes)) == 55
    assert len({row for row, _ in mapped.nodes[(rows - 1) * width :]}) == 1
    across = map_nodes(topology, Layout(8, 1, 4, 14), 8)  # eight columns of seven
    assert len({column for _, column in across.nodes[:7]}) == 1
    with pytest.raises(ValueError, match="hold 56 so"):
        map_nodes(topology, Layout(8, 1, 4, 15), 8)
    pairs = map_nodes(topology, Layout(8, 2, 3, 9), 8)  # of an even width
    assert all(len({row for row, _ in block}) == 1 for block in blocks(pairs, 2))


@pytest.mark.parametrize(
    "failed",
    [
        random.Random(3).sample(PLACES, 3),
        ((3, 5), (1, 2)),
        ((0, 0), (1, 2), (4, 4)),
        ((0, 0), (1, 0), (2, 3), (5, 3)),
        ((7, 1), (6, 1), (5, 6), (2, 6), (0, 4)),
    ],
)
def test_rates_with_nodes_that_stand_in_are_the_count_of_bytes_per_link(failed) -> None:
    topology = dataclasses.replace(
        grid("all-to-all", (8, 8), *failed), node_devices=1, link_bytes_per_second=LINK
    )
    mapped = map_nodes(topology, Layout(1, 1, 8, 7), 1)
    assert mapped.topology.used == (8, 7) and mapped.displaced
    every = grid_links(8, 8, 4).items()
    links = {link: rate for link, rate in every if not set(link) & set(failed)}
    network = Network.of(mapped.topology, H100)
    for members, stride in ((7, 1), (8, 7)):  # rows, columns
        pairs = []
        for first in range(56):
            if first // stride % members == 0:
                group = mapped.nodes[first : first + members * stride : stride]
                pairs += permutations(group, 2)
        rate = network.all_to_all(members, stride)
        assert rate == pytest.approx(members / busiest(links, pairs), rel=0.01)


def test_stages_lie_below_each_other_where_they_can() -> None:
    mapped = map_nodes(grid("all-to-all", (8, 8), (0, 0)), Layout(8, 1, 4, 6), 8)
    first, second = mapped.nodes[0], mapped.nodes[6]
    assert sum(a != b for a, b in zip(first, second, strict=True)) == 1
    assert mapped.labels()[first] == "0.0" and mapped.labels()[second] == "1.0"


def test_small_jobs_and_experts_of_several_replicas() -> None:
    small = map_nodes(grid("all-to-all", (2, 2), (0, 0)), Layout(2, 1, 2, 2), 8)
    assert len(small.nodes) == 1 and small.labels()[small.nodes[0]] == "0-1.0-1"
    half = map_nodes(grid("all-to-all", (2, 2)), Layout(4, 1, 2, 2), 8)
    assert [half.labels()[place] for place in half.nodes] == ["0.0-1", "1.0-1"]
    shared = map_nodes(grid("all-to-all", (3, 3), (0, 0)), Layout(8, 1, 1, 4), 8, ep=16)
    assert all(len({row for row, _ in block}) == 1 for block in blocks(shared, 2))
    with pytest.raises(ValueError, match="groups of 12 ranks over nodes of 8"):
        map_nodes(grid("all-to-all", (3, 3)), Layout(4, 3, 1, 1), 8)


def test_the_rates_are_those_of_the_nodes_that_are_used() -> None:
    """Direct links of the nodes that are left have the rate of a grid without failures."""
    rates = []
    for failed in ((), ((0, 0),)):
        found = map_nodes(grid("all-to-all", (8, 8), *failed), Layout(8, 1, 8, 4), 8).topology
        assert not found.failed_nodes and not found.hosts
        rates.append(Network.of(found, H100).all_to_all(32))
    assert rates[0] == rates[1]
