"""Documents that continue others compute what the plain model computes of whole copies."""

import pytest

from megatron_epp.certify.batches import RandomBatch, modes_drawn
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from tests.certify.frame import CheckedFrame
from tests.certify.trial import CheckedTrial
from tests.mcore.certified import certified, models
from tests.mcore.models import BALANCED, MTP, V3, WINDOWS

everything = pytest.mark.everything

FRAME = CheckedFrame(61, (2,), replicas=1, modes=modes_drawn(EXECUTABLE), trees=True)


def shows(way: str, drawn: RandomBatch) -> bool:
    """Whether the fault must show (test_faults.py) on a replica."""
    return any(_shows(way, drawn, replica) for replica in range(drawn.step.replicas))


def _shows(way: str, drawn: RandomBatch, replica: int) -> bool:
    """Several documents continue one; they continue one that continues another; any does."""
    plan = drawn.step.plans[replica]
    parents = [prefix.document for prefix in plan.prefixes if prefix is not None]
    if way == "lose a branch":
        return any(parents.count(parent) > 1 for parent in parents)
    if way == "mistake values":
        return any(prefix is not None and prefix.stop > 1 for prefix in plan.prefixes)
    if way == "see the nearest":
        return any(plan.prefixes[parent] is not None for parent in parents)
    weights = [
        [drawn.loss_masks[sample][plan.offset(d) :][:length] for sample in samples]
        for d, (samples, length) in enumerate(
            zip(drawn.step.part(replica).samples_of(replica), plan.documents, strict=True)
        )
    ]
    if way == "count one document":
        return any(sum(map(any, masks)) > 1 for masks in weights)
    if way == "mistake the last label":
        return any(any(mask[-1] for mask in weights[parent]) for parent in parents)
    return bool(parents)


BOTH = ("aux_loss", "seq_aux_loss")


def experts(degrees: Degrees, *balanced: str, ep: int = 1, **others) -> CheckedTrial:
    """A batch for each of these losses of routers; a loop takes means of batches and of tokens."""
    over = f"--expert-model-parallel-size {ep}" + " --sequence-parallel" * (degrees.tp > 1)
    lines = [f"{LLAMA} --num-layers {2 * degrees.pp} {over} {BALANCED}{kind}" for kind in balanced]
    return CheckedTrial(degrees, models(*lines), len(lines), trees=True, **others)


def trees(degrees: Degrees, flags: str, batches: int, **others) -> CheckedTrial:
    return CheckedTrial(degrees, models(flags), batches, trees=True, **others)


FOUR = f"{LLAMA} --num-layers 4"
SSM = f"{LLAMA} --mamba-num-heads 32 --mamba-num-groups 8 --hybrid-layer-pattern=MG*"
PLANS = {
    "stages and replicas": trees(Degrees(2, 1, 2), FOUR, 4),
    "ranks of a stage": trees(Degrees(1, 2, 1), f"{LLAMA} --num-layers 2 --sequence-parallel", 3),
    "states": trees(Degrees(1, 1, 1), SSM, 3),
    "four stages": trees(Degrees(4, 1, 1), FOUR, 3),
    "MTP in V placement": trees(Degrees(2, 1, 1), f"{FOUR} {MTP} --epp-placement v", 2),
    "vocabulary parallelism": trees(Degrees(2, 1, 1), f"{FOUR} --epp-vocab-parallel on", 2),
    "MLA on context-parallel ranks": trees(Degrees(1, 1, 1, cp=2), f"{V3} --num-layers 2", 2),
    "windows": trees(Degrees(1, 1, 1), f"{LLAMA} --num-layers 2 {WINDOWS}", 2),
}
# Rows that samples share count in the routers' losses of each.
TRIALS = {
    **PLANS,
    "loops": trees(Degrees(4, 1, 1), FOUR, 4, loop=True),
    "experts": experts(Degrees(2, 1, 2), *BOTH),
    "ranks share experts": experts(Degrees(2, 2, 1), *BOTH, ep=2),
    "replicas share experts": experts(Degrees(2, 1, 2), *BOTH, ep=2),
    "ranks share a document": experts(Degrees(1, 1, 1, cp=2), *BOTH, ep=2),
    "loops, experts": experts(Degrees(2, 1, 1), *BOTH[:1] * 2, *BOTH[1:] * 2, loop=True, seed=4),
    "loops, ranks share experts": experts(Degrees(2, 1, 1, cp=2), *BOTH, ep=2, loop=True, seed=4),
    "loops, packed, replicas share experts": experts(
        Degrees(2, 1, 2), *BOTH, ep=2, loop=True, packed=True, seed=4
    ),
    "first": experts(Degrees(1, 2, 1), *BOTH, ep=2, loop=True, seed=4),
}


# The first tier has a loop whose two ranks share rows and experts.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[everything] * (name != "first")) for name in TRIALS]
)
def test_random_trees_compute_what_copies_compute(name: str) -> None:
    _, found = certified(TRIALS[name], *(("beside",) if name in PLANS else ()))
    assert sum(batch.coverage.branches for batch in found) > 4
