"""Rail rings between nodes: how they join a row or column of a grid, and their rates.

A rail ring uses two of a node's ports in a dimension (row or column) of the grid. A Hamiltonian
decomposition (Walecki's construction) gives each pair of n nodes a direct link on exactly one of
the rings. There are (n - 1) / 2 rings if n is odd. If n is even, there are (n - 2) / 2 rings and a
perfect matching. One more rail joins the two nodes of each matched pair with both of their ports:

    n = 5:  4 0 1 3 2    4 1 2 0 3       two rings; each of the 10 pairs is adjacent in one of them

Rates follow from the exact number of bytes on the busiest link, in closed form. If every member of
a group sends one byte to every other member, the busiest link carries this number of bytes:

    all-to-all   direct links: 1
    ring         of k members: floor(k^2 / 4) / 2. The distances from one member to the others add
                 up to floor(k^2 / 4), half of them in each direction.
    line         of k members of a longer ring: floor(k^2 / 4), at its middle in each direction
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

RINGS, TORUS, ALL_TO_ALL = "rings", "torus", "all-to-all"


def hamiltonian_rings(nodes: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Return rings through all nodes, and pairs, that together join every two nodes exactly once.

    The list of pairs is empty if ``nodes`` is odd; otherwise each node is in one pair.
    """
    last = nodes - 1
    if nodes % 2:
        zigzag = [0]
        for step in range(1, last):
            zigzag.append(zigzag[-1] + (step if step % 2 else -step))
        return [[last, *((k + at) % last for at in zigzag)] for k in range(last // 2)], []
    # Matching i joins i - j to i + j, and i to the last node; two adjacent matchings make a ring.
    rings = []
    for first in range(0, nodes - 2, 2):
        ring, at = [last, first], first
        while len(ring) < nodes:
            at = (2 * (first + (len(ring) + 1) % 2) - at) % last
            ring.append(at)
        rings.append(ring)
    pairs = [((last - 1 - j) % last, (last - 1 + j) % last) for j in range(1, nodes // 2)]
    return rings, [(last, last - 1), *pairs]


@dataclass(frozen=True, slots=True)
class Dimension:
    """Nodes of a row or column, or of a part of it (dimensions_of), and the rails that join them.

    Attributes:
        nodes: number of nodes that are joined.
        wiring: "rings": circuit switches close a ring through the members of each group; "torus":
            one fixed ring; "all-to-all": rings of a Hamiltonian decomposition.
        rails: number of rings that a node is on.
        bytes_per_second: rate of a node in one direction, over all rails of the dimension.
    """

    nodes: int
    wiring: str
    rails: int
    bytes_per_second: float

    @property
    def pair_bytes_per_second(self) -> float:
        """Rate of the direct link between two nodes.

        Rails that do not complete a further Hamiltonian decomposition are idle.
        """
        if self.nodes == 2:
            return self.bytes_per_second
        return self.rails // (self.nodes // 2) * self.bytes_per_second / (2 * self.rails)

    def pair_seconds(self, members: int, stride: int) -> float:
        """Return the seconds of the busiest link if each member sends a byte to all other members.

        The ``members`` of a group are ``stride`` nodes apart. The nodes between them belong to
        groups of the same size, which communicate at the same time.
        """
        if self.wiring == ALL_TO_ALL:
            return 1 / self.pair_bytes_per_second
        distances = members * members // 4 / self.bytes_per_second  # two directions, half the rate
        return distances * self._detour(members, stride)

    def ring_bytes_per_second(self, members: int, stride: int) -> float:
        """Return a node's bus bandwidth in gathers and scatters over rings of ``members``."""
        if self.wiring == ALL_TO_ALL:
            if members == 2:
                return self.pair_bytes_per_second
            return (members - 1) // 2 * 2 * self.pair_bytes_per_second
        return self.bytes_per_second / self._detour(members, stride)

    def shift_bytes_per_second(self, stride: int) -> float:
        """Return a node's bytes per second if all nodes send to the node ``stride`` places later.

        With all-to-all wiring a node has n - 1 links. One leads directly to the receiver. Bytes on
        the others take two hops, at half the rate, so the total is the rate of n / 2 links.
        """
        if self.wiring == ALL_TO_ALL:
            return self.pair_bytes_per_second * self.nodes / 2
        if self.nodes == 2:
            return self.bytes_per_second
        return self.bytes_per_second / 2 / (stride if self.wiring == TORUS else 1)

    def _detour(self, members: int, stride: int) -> int:
        """Return how many times longer paths are than on a ring that joins only the members."""
        if self.wiring == RINGS:
            return 1
        closed = members * stride == self.nodes
        return stride * (1 if closed else 2)


def dimensions_of(nodes: int, wiring: str, rails: int, bytes_per_second: float) -> list[Dimension]:
    """Return the dimensions into which the wiring divides a row or column of ``nodes``.

    There is one dimension, or two if the wiring is all-to-all and the rails are too few to join all
    pairs. The product of the two sizes is ``nodes``.

    Args:
        nodes: number of nodes in the row or column.
        wiring: how rails join them; see :class:`Dimension`.
        rails: number of rings that a node is on.
        bytes_per_second: rate of a node in one direction, over all rails.

    Raises:
        ValueError: the rails are too few even for two dimensions.
    """
    if wiring != ALL_TO_ALL or rails >= nodes // 2:
        return [Dimension(nodes, wiring, rails, bytes_per_second)]
    factors = [a for a in range(2, nodes) if nodes % a == 0 and a // 2 + nodes // a // 2 <= rails]
    if not factors:
        raise ValueError(
            f"rails {rails}: too few for {nodes} nodes of a row or column; expected "
            f"{nodes // 2}, which joins each to all, or a number of nodes with two factors a and b "
            "of which a / 2 + b / 2 rails join each to all"
        )
    inner = min(factors, key=lambda a: (abs(a - nodes // a), a))
    times = rails // (inner // 2 + nodes // inner // 2)  # number of decompositions of each
    parts = []
    for size in (inner, nodes // inner):
        own = size // 2 * times
        parts.append(Dimension(size, wiring, own, bytes_per_second * own / rails))
    return parts


def members_in(sizes: Sequence[int], members: int, stride: int) -> list[tuple[int, int]]:
    """Return, for every dimension, (a group's members in it, distance between two of them).

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
    places = []
    for size in sizes:
        if stride >= size:
            places.append((1, 1))
            stride //= size
            continue
        here = min(members, -(-size // stride))
        places.append((here, stride))
        members, stride = -(-members // here), 1
    return places


def all_to_all_rate(dimensions: Sequence[Dimension], places: Sequence[tuple[int, int]]) -> float:
    """Return the bytes per second that a node sends to other nodes of its group in an all-to-all.

    Bytes traverse one dimension after the other. A link of a dimension carries the bytes of its row
    or column (``pair_seconds``), times the number of members in the other dimensions. ``places``
    come from :func:`members_in`.
    """
    total = prod(members for members, _ in places)
    return (total - 1) / max(
        total / members * dimension.pair_seconds(members, stride)
        for dimension, (members, stride) in zip(dimensions, places, strict=True)
        if members > 1
    )


def ring_rate(dimensions: Sequence[Dimension], places: Sequence[tuple[int, int]]) -> float:
    """Return the bus bandwidth of a node in gathers and scatters over the group.

    With two dimensions of n and m members, one part of the bytes is exchanged in the first
    dimension, then 1 / n of it in the second. The other part is exchanged in the opposite order.
    The total, 1 - 1 / (n m) of all bytes, is divided over the dimensions in proportion to their
    rates, as far as these two orders allow. ``places`` come from :func:`members_in`.
    """
    rate, total = 0.0, 1
    for dimension, (members, stride) in zip(dimensions, places, strict=True):
        if members == 1:
            continue
        own = dimension.ring_bytes_per_second(members, stride)
        if total == 1:
            rate, total = own, members
            continue
        moved = 1 - 1 / (total * members)
        least, most = (1 - 1 / total) / members, 1 - 1 / total
        first = min(max(moved * rate / (rate + own), least), most)
        rate, total = moved / max(first / rate, (moved - first) / own), total * members
    return rate


def shift_rate(dimensions: Sequence[Dimension], stride: int) -> float:
    """Return the bytes per second that a node sends to the node ``stride`` places after it."""
    for dimension in dimensions:
        if stride < dimension.nodes:
            return dimension.shift_bytes_per_second(stride)
        stride //= dimension.nodes
    return dimensions[-1].shift_bytes_per_second(1)
