"""What tests of sabotaged certificates share, outside the ranks that are sabotaged."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path

from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import FLOAT64, Trial
from megatron_epp.mcore.certify.command import certify_training


def stand_in_order(ways: Sequence[str], sabotage: Path) -> bool:
    """Whether the file lists a function of that name for every way but \"nothing\", in order."""
    source = sabotage.read_text()
    listed = source[source.index("WAYS: ") :]
    places = [listed.find(way.replace(" ", "_")) for way in ways if "nothing" not in way]
    return -1 not in places and places == sorted(places)


def first_seed(batches: int, fragile: Callable[[int, int], bool]) -> int:
    """The first with which every batch is one that each way breaks: ``fragile(number, seed)``."""
    return next(seed for seed in count() if all(fragile(n, seed) for n in range(batches)))


def judged_alone(
    model: str, ways: Sequence[str], seed: int, sabotage: Path, dtype: str = FLOAT64
) -> Mapping[str, BatchVerdict]:
    """The certificate of one process whose batches are sabotaged, one after the other, in every
    way, in the order of the file."""
    assert stand_in_order(ways, sabotage)
    models = (tuple(model.split()),)
    trial = Trial(Degrees(1, 1, 1), models, len(ways), seed, interfere=sabotage, dtype=dtype)
    return dict(zip(ways, certify_training(trial), strict=True))


def require_shown(batch: BatchVerdict, way: str) -> None:
    """Wrong numbers, far beyond the bound, and no other complaint; none where nothing is broken."""
    if "nothing" in way:
        assert batch.passed, batch
        return
    assert not batch.passed and not batch.problems, batch
    assert batch.gradient_error > 1e6 * BOUND, batch
