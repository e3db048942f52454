"""Every kind of layer under ``--epp``: certified over all degrees, with faults injected."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import pytest

from megatron_epp.certify.batches import Frame, RandomBatch, modes_drawn
from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_EXPERTS, OF_MLA
from megatron_epp.mcore.kinds.window.certificate import WINDOW
from tests.mcore.certified import certified
from tests.mcore.fault_injection import FAULTS, first_seed, inject_alone, names, require_shown
from tests.mcore.models import (
    DSA,
    GATED_DELTA_NET,
    HYBRID_MLA,
    HYBRID_MOE,
    INDEXER,
    LITE,
    MLA,
    MTP,
    MTP_MLA,
    MTP_MOE,
    PATTERN,
    SSM,
    SSM_MOE,
    V3,
    V3_MOE,
    WINDOWS,
)

pytestmark = pytest.mark.everything

# ------------------------------------------------------------------ without faults

SPARSE_LOSS = "--dsa-indexer-use-sparse-loss"
SHARDED = "--sequence-parallel --expert-model-parallel-size 2"
EVERY = ("packed", "split", "selective", "offloaded", "halved")


def trial(degrees: Degrees, *models: str, batches: int = 4, overlap: bool = False) -> Trial:
    """``models`` have the batches in turn."""
    return Trial(degrees, tuple(tuple(one.split()) for one in models), batches, overlap=overlap)


# By name: the trial, what the first line says of its model, what its batches must cover.
TRIALS: Mapping[str, tuple[Trial, str, tuple[str, ...]]] = {
    "MLA over tensor-parallel stages": (
        trial(
            Degrees(pp=2, tp=2, dp=1),
            f"{V3} --num-layers 4 --sequence-parallel",
            f"{LITE} --num-layers 4",
            batches=8,
        ),
        "latents of ",
        ("cut",),
    ),
    "MLA over context-parallel ranks": (
        trial(Degrees(pp=1, tp=1, dp=1, cp=2), f"{V3} --num-layers 2"),
        "latents of ",
        ("cut",),
    ),
    "MLA and MoE": (
        trial(Degrees(pp=2, tp=1, dp=2), f"{V3} {V3_MOE} --num-layers 4", overlap=True),
        "latents of ",
        ("cut",),
    ),
    # DeepSeek-V3.2's: dense and then experts, the indexer taught on what it chose.
    "DSA over stages": (
        trial(
            Degrees(pp=2, tp=1, dp=1),
            *(f"{V3} {DSA} {V3_MOE} --num-layers 4 {loss}" for loss in (SPARSE_LOSS, "")),
            batches=6,
        ),
        "indexer of 32 heads",
        ("cut",),
    ),
    "DSA over tensor-parallel ranks": (
        trial(
            Degrees(pp=1, tp=2, dp=1),
            *(
                f"{V3} {DSA} --num-layers 2 --sequence-parallel {loss}"
                for loss in ("", SPARSE_LOSS)
            ),
        ),
        "indexer of 32 heads",
        ("cut",),
    ),
    "DSA in a hybrid model": (
        trial(
            Degrees(pp=2, tp=1, dp=1),
            f"{MLA} --q-lora-rank 384 --rope-type rope {INDEXER} {SPARSE_LOSS} "
            f"--no-dsa-indexer-scoring-relu {PATTERN}D-|D-",
            batches=2,
        ),
        "indexer of 32 heads",
        ("cut",),
    ),
    "SSM over stages": (
        trial(Degrees(pp=2, tp=1, dp=1), f"{SSM}{PATTERN}M*-GM|GM-*M", overlap=True),
        "",
        ("packed", "cut"),
    ),
    "SSM over tensor-parallel ranks": (
        trial(
            Degrees(pp=1, tp=2, dp=1),
            f"{SSM} {SSM_MOE} --sequence-parallel {PATTERN}MEG*M",
            batches=3,
        ),
        "",
        ("packed", "cut"),
    ),
    "SSM over context-parallel ranks": (
        trial(Degrees(pp=1, tp=1, dp=1, cp=2), f"{SSM}{PATTERN}MG*-M"),
        "",
        ("packed", "cut"),
    ),
    # In turn with torch's rule and convolution, which know one sequence a call.
    "gated delta net in a GPTModel": (
        trial(
            Degrees(pp=2, tp=1, dp=1), GATED_DELTA_NET, f"{GATED_DELTA_NET} --deterministic-mode"
        ),
        "",
        ("packed", "cut"),
    ),
    "hybrid, one stage": (
        trial(Degrees(pp=1, tp=1, dp=1), f"{LLAMA} {HYBRID_MOE} --qk-layernorm {PATTERN}*-*E*-"),
        "HybridModel ",
        EVERY,
    ),
    "hybrid, tensor-parallel stages": (
        trial(Degrees(pp=2, tp=2, dp=1), f"{LLAMA} {HYBRID_MOE} {SHARDED} {PATTERN}*-*E*-*E*-"),
        "HybridModel ",
        EVERY,
    ),
    # In turn with vocabulary parallelism.
    "hybrid, four stages, tied, MLA, one without attention": (
        trial(
            Degrees(pp=4, tp=1, dp=1),
            *(f"{HYBRID_MLA} {on} {PATTERN}+-|+|-+|--" for on in ("", "--epp-vocab-parallel on")),
            overlap=True,
        ),
        "HybridModel ",
        EVERY,
    ),
    # In turn: DeepSeek-V3's shape; vocabulary parallelism; a repeated depth of two layers.
    "MTP": (
        trial(
            Degrees(pp=2, tp=1, dp=1),
            f"{MTP_MLA} {MTP_MOE}",
            f"{LLAMA} --num-layers 4 {MTP} --epp-vocab-parallel on",
            f"{LLAMA} {PATTERN}*-*|*-*-/*E/*E --mtp-use-repeated-layer {MTP_MOE}",
            batches=6,
        ),
        "further tokens predicted",
        EVERY,
    ),
}


# Whose modules other trials go through, too: MLA over tensor-parallel ranks and with MoE under DSA,
# SSM over stages and context-parallel ranks, this hybrid in test_vocabulary_parallel.py.
AT_LENGTH = {
    "MLA over tensor-parallel stages",
    "MLA and MoE",
    "SSM over tensor-parallel ranks",
    "hybrid, tensor-parallel stages",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in AT_LENGTH)) for n in TRIALS]
)
def test_random_plans_compute_what_the_reference_model_computes(name: str) -> None:
    job, said, covered = TRIALS[name]
    lines, judged = certified(job)
    assert said in lines[0]
    # With MLA one batch keeps K and V, the next one latents.
    for batches in (judged[::2], judged[1::2]) if name.startswith("MLA") else (judged,):
        for what in covered:
            assert sum(getattr(batch.coverage, what) for batch in batches) > 0, what


# ------------------------------------------------------------------ with faults


def cut(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document of the batch is cut."""
    (plan,) = drawn.step.plans
    return max(slices_of(plan).later) >= 0


def cut_beside_others(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut, and a chunk has several."""
    (plan,) = drawn.step.plans
    return cut(fault, drawn) and any(len(chunk.spans) > 1 for chunk in plan.chunks)


def cut_and_up_projected_again(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut, and a chunk recomputes an up-projection."""
    (plan,) = drawn.step.plans
    return cut(fault, drawn) and any(OF_MLA in letters for letters in plan.recompute[0])


def between_two_others(fault: str, drawn: RandomBatch) -> bool:
    """Whether a slice shorter than the window lies between two others."""
    (plan,) = drawn.step.plans
    slices = slices_of(plan)
    return fault == "nothing" or any(
        slices.later[chunk] >= 0 and span.start > 0 and span.tokens < WINDOW
        for chunk in range(len(plan.chunks))
        for span in plan.chunks[chunk].spans
        if span.document == slices.document[chunk]
    )


def counts(drawn: RandomBatch, span) -> bool:
    """Whether ``span`` has targets."""
    document = drawn.step.assignments[0][span.document]
    return bool(drawn.loss_masks[document][span.start : span.stop].any())


def state_is_carried(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut; where a call or a document begins wrongly, also after another in a
    chunk, with targets."""
    (plan,) = drawn.step.plans
    after = [span for chunk in plan.chunks for span in chunk.spans[1:] if counts(drawn, span)]
    if fault == "begin in the middle of a call":
        return any(span.start > 0 for span in after)
    return bool(after) if fault == "run over documents" else cut(fault, drawn)


def targets_before_others(fault: str, drawn: RandomBatch) -> bool:
    """Whether a slice with targets has others after it."""
    (plan,) = drawn.step.plans
    return any(
        span.stop < plan.documents[span.document] and counts(drawn, span)
        for chunk, later in zip(plan.chunks, slices_of(plan).later, strict=True)
        if later >= 0
        for span in chunk.spans
    )


@dataclass(frozen=True)
class Injection:
    """Faults of a kind of layer, a batch each, in one process.

    shows: whether a fault must show in a batch; layers: of the small model
    """

    model: str
    shows: Callable[[str, RandomBatch], bool]
    layers: int = 2
    modes: str = EXECUTABLE


INJECTIONS = {
    "mla": Injection(
        f"{V3} --num-layers 2 --epp-mla-keeps latents",
        cut_and_up_projected_again,
        modes=EXECUTABLE + OF_MLA,
    ),
    "dsa": Injection(f"{V3} {DSA} --num-layers 2", cut_beside_others, modes=EXECUTABLE + OF_MLA),
    "ssm": Injection(f"{SSM}{PATTERN}MM-M", state_is_carried, layers=4),
    # Without the bias that moves with every batch, those with faults, too.
    "hybrid": Injection(
        f"{LLAMA} {HYBRID_MOE} {PATTERN}*-*E*-".replace("--moe-router-enable-expert-bias ", ""),
        cut,
        layers=6,
        modes=EXECUTABLE + OF_EXPERTS,
    ),
    "window": Injection(f"{LLAMA} --num-layers 2 {WINDOWS}", between_two_others),
    "mtp": Injection(
        f"{LLAMA} --num-layers 2 {MTP} --mtp-use-repeated-layer", targets_before_others, layers=4
    ),
}


@cache
def judged(kind: str) -> Mapping[str, BatchVerdict]:
    of, table = INJECTIONS[kind], FAULTS / f"{kind}.py"
    letters = modes_drawn(of.modes)
    frame = Frame(61, (of.layers,), replicas=1, modes=letters, splits=True)
    return inject_alone(table, of.model, first_seed(table, frame, of.shows))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind in INJECTIONS for fault in names(FAULTS / f"{kind}.py")],
)
def test_a_fault_shows_and_nothing_else_does(kind: str, fault: str) -> None:
    batch = judged(kind)[fault]
    if fault != "keep one index for all runs":
        require_shown(batch, fault)
        return
    # Or the store refuses what it is handed.
    assert batch.problems or batch.gradient_error > 1e6 * BOUND
    assert not batch.passed
