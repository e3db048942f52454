"""Faults of what slices of loops add to the executor: every one shows."""

from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA
from tests.certify.loops.micro_batches import LoopFrame, loop_loss
from tests.certify.trial import ENCODER, CheckedTrial
from tests.mcore.fault_injection import inject, names, require_shown
from tests.mcore.test_trees import FRAME

pytestmark = pytest.mark.everything

FOLDER = Path(__file__).with_name("faults")
LLAMA_2 = (tuple(f"{LLAMA} --num-layers 2".split()),)
ENCODERS, RANKS, TREES = (FOLDER / f"{name}.py" for name in ("encoder", "ranks", "trees"))


def judged(table: Path, degrees: Degrees, **others) -> Mapping[str, BatchVerdict]:
    return inject(table, CheckedTrial(degrees, LLAMA_2, loop=True, **others))


def branches(number: int, seed: int) -> bool:
    """Whether somewhere several parts continue one, in the batch of a loop's turn."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.loops.adapters.samples import Samples

    (drawn,) = LoopFrame(FRAME, False).draw(seed, number).micro_batches
    for batch in drawn:
        nodes = Samples(loop_loss, share_from=1).prefixes(batch).nodes
        parents = [node.parent for node in nodes if node.parent >= 0]
        if len(set(parents)) < len(parents):
            return True
    return False


@pytest.fixture(scope="module")
def front() -> Mapping[str, BatchVerdict]:
    return judged(ENCODERS, Degrees(1, 1, 1), loop_model=ENCODER)


@pytest.fixture(scope="module")
def ranks() -> Mapping[str, BatchVerdict]:
    return judged(RANKS, Degrees(1, 1, 1, cp=2))


@pytest.fixture(scope="module")
def trees() -> Mapping[str, BatchVerdict]:
    half = range(len(names(TREES)) // 2)  # the same batches in both turns
    seed = next(seed for seed in count() if all(branches(number, seed) for number in half))
    return judged(TREES, Degrees(1, 1, 1), seed=seed, trees=True)


@pytest.mark.parametrize("way", names(ENCODERS))
def test_a_broken_front_shows(front, way) -> None:
    assert front[way].coverage.cut > 0
    require_shown(front[way], way)


@pytest.mark.parametrize("way", names(RANKS))
def test_rows_of_another_rank_show(ranks, way) -> None:
    if way == "gather from the wrong rank":  # the gradient of a mean is that of any outputs
        assert ranks[way].loss_error > 1e6 * BOUND and not ranks[way].problems
    else:
        require_shown(ranks[way], way)


@pytest.mark.parametrize("way", names(TREES))
def test_broken_branches_show(trees, way) -> None:
    assert trees[way].coverage.branches > 0
    require_shown(trees[way], way)
