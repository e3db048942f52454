"""What tests of sabotaged certificates share, outside the ranks that are sabotaged."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_epp.mcore.certify.command import Judged, Trial, certify
from megatron_epp.mcore.certify.scale_down import Degrees


def stand_in_order(ways: Sequence[str], sabotage: Path) -> bool:
    """Whether the file lists a function of that name for every way but \"nothing\", in order."""
    source = sabotage.read_text()
    listed = source[source.index("WAYS: ") :]
    places = [listed.find(way.replace(" ", "_")) for way in ways if "nothing" not in way]
    return -1 not in places and places == sorted(places)


def judged_alone(
    model: str, ways: Sequence[str], seed: int, sabotage: Path
) -> Mapping[str, Judged]:
    """The certificate of one process whose batches are sabotaged, one after the other, in every
    way."""
    trial = Trial(Degrees(1, 1, 1), (tuple(model.split()),), len(ways), seed, interfere=sabotage)
    return dict(zip(ways, certify(trial), strict=True))
