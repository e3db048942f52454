"""Closed forms of rails against a count of the bytes on every link."""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import permutations, product

import pytest

from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.network.rails import matched_pairs
from megatron_epp.cost.network.topology import ALL_TO_ALL, SWITCH, Network, Topology

H100 = DEVICES["h100-80g"]
LINK = 1.0  # bytes a second of a node, one direction
Node = tuple[int, int]


def rings_of(nodes: int) -> list[list[int]]:
    """Walecki's rings, which together with the matched pairs join every two nodes exactly once."""
    last = nodes - 1
    if nodes % 2:
        zigzag = [0]
        for step in range(1, last):
            zigzag.append(zigzag[-1] + (step if step % 2 else -step))
        return [[last, *((k + at) % last for at in zigzag)] for k in range(last // 2)]
    # Matching i joins i - j to i + j, and i to the last node; two adjacent matchings make a ring.
    rings = []
    for first in range(0, nodes - 2, 2):
        ring, at = [last, first], first
        while len(ring) < nodes:
            at = (2 * (first + (len(ring) + 1) % 2) - at) % last
            ring.append(at)
        rings.append(ring)
    return rings


def rail_rings(nodes: int, rails: int) -> list[list[int]]:
    """The rings through all nodes of a row."""
    if nodes <= 2:
        return [list(range(nodes))] * rails
    return rings_of(nodes) * (rails // (nodes // 2))


def line_links(nodes: int, rails: int, rate: float) -> Counter:
    """Bytes per second of every directed link of a row of nodes, rail by rail."""
    links: Counter = Counter()
    port = rate / (2 * rails)
    for ring in rail_rings(nodes, rails):
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            links[one, other] += port
            links[other, one] += port
    for one, other in matched_pairs(nodes) * (rails // (nodes // 2)):  # both ports of the rail
        links[one, other] += 2 * port
        links[other, one] += 2 * port
    return links


def grid_links(rows: int, columns: int, rails: int) -> dict[tuple[Node, Node], float]:
    dimensions = sum(size > 1 for size in (rows, columns))
    links: dict[tuple[Node, Node], float] = {}
    if columns > 1:
        for (a, b), rate in line_links(columns, rails, LINK / dimensions).items():
            links |= {((row, a), (row, b)): rate for row in range(rows)}
    if rows > 1:
        for (a, b), rate in line_links(rows, rails, LINK / dimensions).items():
            links |= {((a, column), (b, column)): rate for column in range(columns)}
    return links


def busiest(links: dict[tuple[Node, Node], float], pairs: Iterable[tuple[Node, Node]]) -> float:
    """Seconds of the busiest link where each pair's byte is divided over its shortest paths."""
    neighbours: dict[Node, list[Node]] = {}
    for one, other in links:
        neighbours.setdefault(one, []).append(other)
    sources: dict[Node, list[Node]] = {}
    for one, other in pairs:
        sources.setdefault(one, []).append(other)
    load: Counter = Counter()
    for source, wanted in sources.items():
        distance, paths, queue, order = {source: 0}, Counter({source: 1}), deque([source]), []
        while queue:
            here = queue.popleft()
            order.append(here)
            for there in neighbours[here]:
                if there not in distance:
                    distance[there] = distance[here] + 1
                    queue.append(there)
                if distance[there] == distance[here] + 1:
                    paths[there] += paths[here]
        arriving = Counter(wanted)
        for here in reversed(order):
            for before in neighbours[here]:
                if distance[before] == distance[here] - 1:
                    part = arriving[here] * paths[before] / paths[here]
                    load[before, here] += part
                    arriving[before] += part
    return max(carried / links[link] for link, carried in load.items())


def network(rows: int, columns: int, between: str = ALL_TO_ALL) -> Network:
    topology = Topology(
        "grid", 1, between=between, link_bytes_per_second=LINK, nodes=(rows, columns)
    )
    return Network.of(topology, H100)


SIZES = [(rows, columns) for rows, columns in product(range(1, 9), range(2, 9)) if rows <= columns]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_all_to_all_of_all_nodes_is_the_count_of_bytes_on_the_busiest_link(rows, columns) -> None:
    rails = max(rows // 2, columns // 2)
    places = list(product(range(rows), range(columns)))
    counted = busiest(grid_links(rows, columns, rails), permutations(places, 2))
    nodes = rows * columns
    # A device's bytes, those that stay counted: nodes of them.
    assert network(rows, columns).all_to_all(nodes) == pytest.approx(nodes / counted, rel=0.01)


@pytest.mark.parametrize(
    ("members", "stride"),
    [(4, 1), (8, 1), (2, 4), (4, 2), (8, 8), (4, 8), (4, 16), (16, 1), (8, 2)],
)
def test_all_to_all_of_groups_beside_each_other(members: int, stride: int) -> None:
    """All groups of the grid at once, as all devices have such a group."""
    places = list(product(range(8), range(8)))
    pairs = []
    for first in range(64):
        if first // stride % members == 0:
            group = places[first : first + members * stride : stride]
            assert len(group) == members
            pairs += permutations(group, 2)
    counted = busiest(grid_links(8, 8, 4), pairs)
    assert network(8, 8).all_to_all(members, stride) == pytest.approx(members / counted, rel=0.01)


def ring_pass(rows: int, columns: int, rails: int) -> float:
    """Seconds of the busiest link where every node's byte is reduced and scattered.

    A part of the bytes is scattered in rows first, the rest in columns first, whichever division
    is best of many; each phase divides its bytes over the rings of the rails, both ways round.
    """
    half = LINK / sum(size > 1 for size in (rows, columns))
    row_rate, column_rate = (
        len(rail_rings(size, rails)) * half / rails for size in (columns, rows)
    )
    in_row, in_column = 1 - 1 / columns, 1 - 1 / rows
    if rows == 1:
        return in_row / row_rate
    shares = (step / 2000 for step in range(2001))
    return min(
        max(
            in_row * (share + (1 - share) / rows) / row_rate,
            in_column * (1 - share + share / columns) / column_rate,
        )
        for share in shares
    )


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_gathers_take_rows_and_columns_at_once(rows: int, columns: int) -> None:
    nodes, counted = rows * columns, ring_pass(rows, columns, max(rows // 2, columns // 2))
    rate = network(rows, columns).ring(nodes)
    assert rate == pytest.approx((nodes - 1) / nodes / counted, rel=0.01)


@pytest.mark.parametrize("nodes", range(3, 9))
def test_every_node_sends_to_one_other_over_all_its_links(nodes: int) -> None:
    """Directly, and as much over each of the others as its links carry: no link has more."""
    links = line_links(nodes, nodes // 2, LINK)
    least = min(links.values())
    rate = network(1, nodes).to_neighbour(1, 1, nodes)
    load: Counter = Counter()
    for one in range(nodes):
        other = (one + 1) % nodes
        load[one, other] += least
        for between in set(range(nodes)) - {one, other}:
            part = (rate - least) / (nodes - 2)
            load[one, between] += part
            load[between, other] += part
    assert max(load.values()) == pytest.approx(least)


def test_rings_over_all_to_all_links_have_most_of_a_switchs_rate() -> None:
    assert network(8, 8).ring(64) >= 0.75 * network(8, 8, SWITCH).ring(64)
