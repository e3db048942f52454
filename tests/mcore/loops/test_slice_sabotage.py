"""What slices of loops add to the executor, broken on purpose: every way shows."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.loops.micro_batches import LoopFrame, loop_loss
from megatron_epp.certify.trial import ENCODER, LLAMA, Trial
from megatron_epp.mcore.certify.command import certify_training
from tests.mcore.sabotages import first_seed, require_shown, stand_in_order
from tests.mcore.test_trees import FRAME

FOLDER = Path(__file__).parent
# In the order of each file's WAYS, which only the rank itself can import.
FRONT = (
    "nothing",
    "shift what was seen",
    "give it no gradient",
    "run its backward twice",
    "keep the first gradient alone",
    "nothing again",
)
RANKS = (
    "nothing",
    "gather from the wrong rank",
    "draw the neighbours rows",
    "start from the neighbours rows",
    "nothing but losses of parts",
    "leave parts apart",
)
TREES = (
    "nothing",
    "lose a branch",
    "count shared tokens once",
    "join branches in another order",
    "begin anew",
    "nothing again",
)


def judged(file: str, ways: tuple[str, ...], degrees: Degrees, **others) -> Mapping:
    sabotage, flags = FOLDER / file, tuple(f"{LLAMA} --num-layers 2".split())
    assert stand_in_order(ways, sabotage)
    made = Trial(degrees, (flags,), len(ways), interfere=sabotage, loop="level1", **others)
    return dict(zip(ways, certify_training(made), strict=True))


def branches(number: int, seed: int) -> bool:
    """Whether somewhere several parts continue one, in the batch of a loop's turn."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.loops.adapters.samples import Samples

    (drawn,) = LoopFrame(FRAME, False, True).draw(seed, number).micro_batches
    for batch in drawn:
        nodes = Samples(loop_loss, share_from=1).prefixes(batch).nodes
        parents = [node.parent for node in nodes if node.parent >= 0]
        if len(set(parents)) < len(parents):
            return True
    return False


@pytest.fixture(scope="module")
def front() -> Mapping[str, BatchVerdict]:
    return judged("front_sabotage.py", FRONT, Degrees(1, 1, 1), loop_model=ENCODER)


@pytest.fixture(scope="module")
def ranks() -> Mapping[str, BatchVerdict]:
    return judged("rank_sabotage.py", RANKS, Degrees(1, 1, 1, cp=2))


@pytest.fixture(scope="module")
def trees() -> Mapping[str, BatchVerdict]:
    seed = first_seed(len(TREES) // 2, branches)  # the same batches in both turns
    return judged("tree_sabotage.py", TREES, Degrees(1, 1, 1), seed=seed, trees=True)


@pytest.mark.parametrize("way", FRONT)
def test_a_broken_front_shows(front, way) -> None:
    assert front[way].coverage.cut > 0
    require_shown(front[way], way)


@pytest.mark.parametrize("way", RANKS)
def test_rows_of_another_rank_show(ranks, way) -> None:
    if way == "gather from the wrong rank":  # the gradient of a mean is that of any outputs
        assert ranks[way].loss_error > 1e6 * BOUND and not ranks[way].problems
    else:
        require_shown(ranks[way], way)


@pytest.mark.parametrize("way", TREES)
def test_broken_branches_show(trees, way) -> None:
    assert trees[way].coverage.branches > 0
    require_shown(trees[way], way)
