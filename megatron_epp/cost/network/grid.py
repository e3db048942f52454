"""Grid of nodes with failed nodes and links; its constructor checks nodes, links and names."""

from dataclasses import dataclass
from typing import Any, Self

from megatron_epp.cost.network.rails import ALL_TO_ALL, RINGS, TORUS
from megatron_epp.ir.errors import quoted, require_name

Place = tuple[int, int]  # row, column
Link = tuple[Place, Place]
MOST_NODES = 1 << 16


@dataclass(frozen=True, slots=True)
class HoledGrid:
    """Grid of a topology with failed nodes and links; the fields are those of topology.Topology.

    A node may be given as [row, column] or by host name; it becomes a tuple (row, column).

    Raises:
        ValueError: a field is invalid; the message names the field and the reason.
    """

    between: str
    nodes: tuple[int, ...] = ()
    rails: int = 0
    failed_nodes: tuple[Place, ...] = ()
    failed_links: tuple[Link, ...] = ()
    used: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, topology: Any) -> Self:
        """Return the grid of ``topology``, whose fields may still be lists as in JSON.

        Raises:
            ValueError: a field is invalid; the message names the field and the reason.
        """
        return cls(*(getattr(topology, field) for field in cls.__slots__))

    def __post_init__(self):
        for field in self.__slots__[1:]:
            value = getattr(self, field)
            if field != "rails" and not isinstance(value, list | tuple):
                raise ValueError(f"{field} {quoted(value)}: expected a list")
        rails = self.rails
        if not isinstance(rails, int) or isinstance(rails, bool) or not 0 <= rails <= MOST_NODES:
            raise ValueError(f"rails {quoted(rails)}: expected from 0 to {MOST_NODES}")
        if rails and self.between not in (RINGS, ALL_TO_ALL, TORUS):
            raise ValueError(f"rails {rails}: between {self.between} has no rings; leave it out")
        if not self.nodes:
            for field in ("failed_nodes", "failed_links", "used", "hosts"):
                if getattr(self, field):
                    raise ValueError(f"{field}: expected nodes, the rows and columns of the grid")
            if self.between == TORUS:
                raise ValueError("between torus: expected nodes, the rows and columns of the grid")
            return
        for field in ("nodes", "used"):
            object.__setattr__(self, field, self._sizes(field))
        object.__setattr__(self, "hosts", self._names())
        failed: dict[Place, int] = {}
        for number, value in enumerate(self.failed_nodes):
            place = self._place(f"failed_nodes[{number}]", value)
            _require_new("failed_nodes", number, value, failed.setdefault(place, number))
        if len(failed) == self.nodes[0] * self.nodes[1]:
            raise ValueError(f"failed_nodes: all {len(failed)} nodes failed; expected one at least")
        object.__setattr__(self, "failed_nodes", tuple(failed))
        links: dict[Link, int] = {}
        for number, value in enumerate(self.failed_links):
            link = self._link(f"failed_links[{number}]", value)
            _require_new("failed_links", number, value, links.setdefault(link, number))
        object.__setattr__(self, "failed_links", tuple(links))

    @property
    def live(self) -> list[Place]:
        """Nodes that have not failed, row by row."""
        failed, (rows, columns) = set(self.failed_nodes), self.nodes
        every = ((row, column) for row in range(rows) for column in range(columns))
        return [place for place in every if place not in failed]

    def name(self, place: Place) -> str:
        """Return the host name of ``place``, or its row and column if hosts have no names."""
        row, column = place
        return (
            self.hosts[row * self.nodes[1] + column] if self.hosts else f"row{row}-column{column}"
        )

    def joined(self, one: Place, other: Place) -> bool:
        """Return whether a direct link joins two nodes."""
        apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
        if apart.count(0) != 1 or self.between not in (RINGS, ALL_TO_ALL, TORUS):
            return False
        steps = {1, self.nodes[apart.index(0) ^ 1] - 1}
        return self.between != TORUS or max(apart) in steps

    def _sizes(self, field: str) -> tuple[int, ...]:
        value = tuple(getattr(self, field))
        if not value and field == "used":
            return value
        integers = all(isinstance(size, int) and not isinstance(size, bool) for size in value)
        most = self.nodes if field == "used" else (MOST_NODES, MOST_NODES)
        if (
            len(value) != 2
            or not integers
            or any(not 1 <= size <= limit for size, limit in zip(value, most, strict=True))
            or value[0] * value[1] > MOST_NODES
        ):
            limit = f"the grid's {most[0]} and {most[1]}" if field == "used" else f"{MOST_NODES}"
            raise ValueError(
                f"{field} {quoted(list(value))}: expected [rows, columns], each at least 1, at "
                f"most {limit}{'' if field == 'used' else ' nodes in all'}"
            )
        return value

    def _names(self) -> tuple[str, ...]:
        rows, columns = self.nodes
        if self.hosts and len(self.hosts) != rows * columns:
            raise ValueError(
                f"hosts: {len(self.hosts)} names; expected {rows * columns}, one for every node of "
                f"{rows} x {columns}"
            )
        known: dict[str, int] = {}
        for number, name in enumerate(self.hosts):
            require_name(f"hosts[{number}]", name)
            if any(each.isspace() for each in name):
                raise ValueError(f"hosts[{number}] {quoted(name)}: expected a name without blanks")
            _require_new("hosts", number, name, known.setdefault(name, number))
        return tuple(self.hosts)

    def _place(self, where: str, value: Any) -> Place:
        rows, columns = self.nodes
        if isinstance(value, str) and value in self.hosts:
            return divmod(self.hosts.index(value), columns)
        numbers = isinstance(value, list | tuple) and all(type(each) is int for each in value)
        if not numbers or len(value) != 2 or not (0 <= value[0] < rows and 0 <= value[1] < columns):
            names = "a name of hosts, or " if self.hosts else ""
            raise ValueError(
                f"{where} {quoted(value)}: there is no such node; expected {names}[row, column] "
                f"from [0, 0] to [{rows - 1}, {columns - 1}]"
            )
        return value[0], value[1]

    def _link(self, where: str, value: Any) -> Link:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError(f"{where} {quoted(value)}: expected two nodes")
        ends = sorted(self._place(where, end) for end in value)
        if not self.joined(ends[0], ends[1]):
            how = {
                TORUS: "neighbours in a row or column",
                RINGS: "two nodes of a row or column",
                ALL_TO_ALL: "two nodes of a row or column",
            }.get(self.between, "none: nodes are joined by switches; name a node in failed_nodes")
            raise ValueError(
                f"{where} {quoted([list(end) for end in ends])}: there is no such link; expected "
                f"{how}"
            )
        return ends[0], ends[1]


def _require_new(field: str, number: int, value: Any, first: int) -> None:
    """Raise a ValueError if entry ``number`` of ``field`` occurred before, as entry ``first``."""
    if first != number:
        shown = list(value) if isinstance(value, tuple) else value
        raise ValueError(
            f"{field}[{number}] {quoted(shown)}: is there twice, first as {field}[{first}]; "
            "expected each once"
        )
