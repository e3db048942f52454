"""Rail rings between nodes: how they join a row or column of a grid, and their rates.

A rail ring uses two of a node's ports in a dimension (row or column) of the grid. A Hamiltonian
decomposition (Walecki's construction) gives each pair of n nodes a direct link on exactly one of
the rings. There are (n - 1) / 2 rings if n is odd. If n is even, there are (n - 2) / 2 rings and a
perfect matching. One more rail joins the two nodes of each matched pair with both of their ports:

    n = 5:  4 0 1 3 2    4 1 2 0 3       two rings; each of the 10 pairs is adjacent in one of them

Rates follow from the exact number of bytes on the busiest link, in closed form: if every member of
a group sends one byte to every other member, the direct link of two members carries one byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


def matched_pairs(nodes: int) -> list[tuple[int, int]]:
    """Return the pairs of nodes that one rail joins with both ports; none if all rails are rings.

    There are such pairs if the number of nodes is even and above 2. Two nodes have no rings: all of
    their rails join them.
    """
    if nodes % 2 or nodes == 2:
        return []
    last = nodes - 1
    pairs = [((last - 1 - j) % last, (last - 1 + j) % last) for j in range(1, nodes // 2)]
    return [(last, last - 1), *pairs]


@dataclass(frozen=True, slots=True)
class Dimension:
    """Nodes of a row or column; rings of a Hamiltonian decomposition join every pair of nodes.

    Attributes:
        nodes: number of nodes that are joined.
        rails: number of rails that a node is on; each uses two of its ports.
        bytes_per_second: rate of a node in one direction, over all rails of the dimension.
    """

    nodes: int
    rails: int
    bytes_per_second: float

    @property
    def pair_bytes_per_second(self) -> float:
        """Rate of the direct link between two nodes in bytes per second.

        Rails that are too few for one more Hamiltonian decomposition are idle.
        """
        if self.nodes == 2:
            return self.bytes_per_second
        return self.rails // (self.nodes // 2) * self.bytes_per_second / (2 * self.rails)

    def ring_bytes_per_second(self, members: int) -> float:
        """Return a node's bus bandwidth in gathers and scatters over rings of ``members``."""
        return max(1, (members - 1) // 2 * 2) * self.pair_bytes_per_second

    @property
    def shift_bytes_per_second(self) -> float:
        """Bytes per second of a node if every node sends to the node a fixed distance after it.

        A node has n - 1 links. One leads directly to the receiver. Bytes on the others take two
        hops, at half the rate, so the total is the rate of n / 2 links.
        """
        return self.pair_bytes_per_second * self.nodes / 2


def members_in(sizes: Sequence[int], members: int, stride: int) -> list[int]:
    """Return the number of a group's members in every dimension.

    Args:
        sizes: number of nodes of each dimension, starting with the dimension that varies fastest.
        members: number of nodes in the group.
        stride: distance between members in the order of the nodes.

    Raises:
        ValueError: the dimensions have too few nodes.
    """
    there = prod(sizes)
    if (members - 1) * stride >= there:
        raise ValueError(
            f"a group of {members} nodes, {stride} apart: the topology has {there} nodes"
        )
    numbers = []
    for size in sizes:
        here = 1
        if stride >= size:
            stride //= size
        else:
            here = min(members, -(-size // stride))
            members, stride = -(-members // here), 1
        numbers.append(here)
    return numbers


def all_to_all_rate(dimensions: Sequence[Dimension], members: Sequence[int]) -> float:
    """Return the bytes per second that a node sends to other nodes of its group in an all-to-all.

    Bytes traverse one dimension after the other. A link of a dimension carries the bytes of a pair
    of its row or column, times the number of members in the other dimensions. ``members`` come from
    :func:`members_in`.
    """
    total = prod(members)
    return (total - 1) / max(
        total / own / dimension.pair_bytes_per_second
        for dimension, own in zip(dimensions, members, strict=True)
        if own > 1
    )


def ring_rate(dimensions: Sequence[Dimension], members: Sequence[int]) -> float:
    """Return the bus bandwidth of a node (bytes per second) in gathers and scatters over a group.

    With two dimensions of n and m members, one part of the bytes is exchanged in the first
    dimension, then 1 / n of it in the second. The other part is exchanged in the opposite order.
    The total, 1 - 1 / (n m) of all bytes, is divided over the dimensions in proportion to their
    rates, as far as these two orders allow. ``members`` come from :func:`members_in`.
    """
    rate, total = 0.0, 1
    for dimension, number in zip(dimensions, members, strict=True):
        if number == 1:
            continue
        own = dimension.ring_bytes_per_second(number)
        if total == 1:
            rate, total = own, number
            continue
        moved = 1 - 1 / (total * number)
        least, most = (1 - 1 / total) / number, 1 - 1 / total
        first = min(max(moved * rate / (rate + own), least), most)
        rate, total = moved / max(first / rate, (moved - first) / own), total * number
    return rate


def shift_rate(dimensions: Sequence[Dimension], stride: int) -> float:
    """Return the bytes per second that a node sends to the node ``stride`` places after it."""
    for dimension in dimensions:
        if stride < dimension.nodes:
            return dimension.shift_bytes_per_second
        stride //= dimension.nodes
    return dimensions[-1].shift_bytes_per_second
