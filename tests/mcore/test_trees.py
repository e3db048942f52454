"""Documents that continue others compute what the plain model computes of whole copies."""

import pytest

from megatron_epp.certify.batches import RandomBatch, modes_drawn
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from tests.certify.backend import main
from tests.certify.frame import CheckedFrame
from tests.certify.trial import CheckedTrial
from tests.mcore.certified import certified, models
from tests.mcore.models import BALANCED, MTP, V3, WINDOWS

everything = pytest.mark.everything

FRAME = CheckedFrame(61, (2,), replicas=1, modes=modes_drawn(EXECUTABLE), trees=True)


def shows(way: str, drawn: RandomBatch) -> bool:
    """Whether the fault must show (test_faults.py): several documents continue one; they continue
    one that continues another; any does."""
    (plan,) = drawn.step.plans
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
            zip(drawn.step.part(0).samples_of(0), plan.documents, strict=True)
        )
    ]
    if way == "count one document":
        return any(sum(map(any, masks)) > 1 for masks in weights)
    if way == "mistake the last label":
        return any(any(mask[-1] for mask in weights[parent]) for parent in parents)
    return bool(parents)


JOBS = {
    "stages and replicas": (Degrees(pp=2, tp=1, dp=2), f"{LLAMA} --num-layers 4", 4),
    "ranks of a stage": (
        Degrees(pp=1, tp=2, dp=1),
        f"{LLAMA} --num-layers 2 --sequence-parallel",
        3,
    ),
    "states": (
        Degrees(pp=1, tp=1, dp=1),
        f"{LLAMA} --mamba-num-heads 32 --mamba-num-groups 8 --hybrid-layer-pattern=MG*",
        3,
    ),
    "four stages": (Degrees(pp=4, tp=1, dp=1), f"{LLAMA} --num-layers 4", 3),
    "MTP in V placement": (
        Degrees(pp=2, tp=1, dp=1),
        f"{LLAMA} --num-layers 4 {MTP} --epp-placement v",
        2,
    ),
    "vocabulary parallelism": (
        Degrees(pp=2, tp=1, dp=1),
        f"{LLAMA} --num-layers 4 --epp-vocab-parallel on",
        2,
    ),
    "MLA on context-parallel ranks": (
        Degrees(pp=1, tp=1, dp=1, cp=2),
        f"{V3} --num-layers 2",
        2,
    ),
    "windows": (Degrees(pp=1, tp=1, dp=1), f"{LLAMA} --num-layers 2 {WINDOWS}", 2),
}


BOTH = ("aux_loss", "seq_aux_loss")


def experts(degrees: Degrees, *balanced: str, ep: int = 1, **others) -> CheckedTrial:
    """A batch for each of these losses of routers; a loop takes means of batches and of tokens."""
    over = f"--expert-model-parallel-size {ep}" + " --sequence-parallel" * (degrees.tp > 1)
    lines = [f"{LLAMA} --num-layers {2 * degrees.pp} {over} {BALANCED}{kind}" for kind in balanced]
    return CheckedTrial(degrees, models(*lines), len(lines), trees=True, **others)


def test_rows_that_samples_of_a_loop_share_count_for_each() -> None:
    """Two ranks share rows and experts. The first tier's certificate of prefixes and experts."""
    _, found = certified(experts(Degrees(1, 2, 1), *BOTH, ep=2, loop=True, seed=4))
    assert sum(batch.coverage.branches for batch in found) > 10


OF_EXPERTS = {
    "plans": experts(Degrees(2, 1, 2), *BOTH),
    "plans, ranks share experts": experts(Degrees(2, 2, 1), *BOTH, ep=2),
    "plans, ranks share a document": experts(Degrees(1, 1, 1, cp=2), *BOTH, ep=2),
    "loops": experts(Degrees(2, 1, 1), *BOTH[:1] * 2, *BOTH[1:] * 2, loop=True, seed=4),
    "loops, ranks share experts": experts(Degrees(2, 1, 1, cp=2), *BOTH, ep=2, loop=True, seed=4),
}


@everything
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_shared_rows_count_for_every_sample(name: str) -> None:
    _, found = certified(OF_EXPERTS[name])
    assert sum(batch.coverage.branches for batch in found) > 4


@everything
@pytest.mark.parametrize("name", JOBS)
def test_random_trees_compute_what_copies_compute(name: str) -> None:
    degrees, flags, batches = JOBS[name]
    _, found = certified(CheckedTrial(degrees, (tuple(flags.split()),), batches, trees=True))
    assert sum(batch.coverage.branches for batch in found) > 5
    assert sum(batch.coverage.beside for batch in found) > 0


@everything
def test_loops_find_what_their_samples_share() -> None:
    trial = CheckedTrial(
        Degrees(pp=4, tp=1, dp=1), (tuple(f"{LLAMA} --num-layers 4".split()),), 4, loop=True,
        trees=True,
    )  # fmt: skip
    _, found = certified(trial)
    assert sum(batch.coverage.branches for batch in found) > 5


@everything
@pytest.mark.parametrize(
    "flags, said",
    [
        (
            "--loop --loop-model encoder",
            "--trees: an encoder sees documents whole, so they share nothing; leave out --loop-mod",
        ),
    ],
)  # fmt: skip
def test_what_trees_do_not_run_with_is_said(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        main(["--trees", "--pp", "1", *flags.split()])
