"""What tests of sabotaged certificates share, outside the ranks that are sabotaged."""

from collections.abc import Sequence
from pathlib import Path


def stand_in_order(ways: Sequence[str], sabotage: Path) -> bool:
    """Whether the file lists a function of that name for every way but \"nothing\", in order."""
    source = sabotage.read_text()
    listed = source[source.index("WAYS: ") :]
    places = [listed.find(way.replace(" ", "_")) for way in ways if "nothing" not in way]
    return -1 not in places and places == sorted(places)
