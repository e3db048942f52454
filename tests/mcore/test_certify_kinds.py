"""Every kind of layer under ``--epp``: certified over all degrees. Faults: test_faults.py."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from tests.mcore.certified import certified
from tests.mcore.models import (
    DSA,
    GATED_DELTA_NET,
    HYBRID_MLA,
    HYBRID_MOE,
    INDEXER,
    MLA,
    MTP,
    MTP_MLA,
    MTP_MOE,
    PATTERN,
    SSM,
    V3,
    V3_MOE,
)

everything = pytest.mark.everything

# ------------------------------------------------------------------ without faults

SPARSE_LOSS = "--dsa-indexer-use-sparse-loss"
SHARDED = "--sequence-parallel --expert-model-parallel-size 2"
GROUPED = "--group-query-attention --num-query-groups 8 "
MIXED = "windows, MLA, MoE, Mamba, gated delta net and MTP"
EVERY = ("packed", "split", "selective", "offloaded", "halved")


def trial(degrees: Degrees, *models: str, batches: int = 4, overlap: bool = False) -> Trial:
    """``models`` have the batches in turn."""
    return Trial(degrees, tuple(tuple(one.split()) for one in models), batches, overlap=overlap)


# By name: the trial, what the first line says of its model, what its batches must cover.
TRIALS: Mapping[str, tuple[Trial, str, tuple[str, ...]]] = {
    # Every kind that one model can have: attention of full heads, MLA and DSA exclude each other,
    # and DSA excludes windows.
    MIXED: (
        trial(
            Degrees(pp=2, tp=2, dp=1),
            f"{SSM} {HYBRID_MLA} {HYBRID_MOE} --untie-embeddings-and-output-weights "
            f"--window-size 127,0 {SHARDED} {PATTERN}+-ME|GE+M/+E".replace(GROUPED, ""),
            batches=3,
        ),
        "MTP of depth",
        ("packed", "cut"),
    ),
    "MLA over context-parallel ranks": (
        trial(Degrees(pp=1, tp=1, dp=1, cp=2), f"{V3} --num-layers 2"),
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
        "MTP of depth",
        EVERY,
    ),
}


# The first tier has the mixed certificate.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[everything] * (name != MIXED)) for name in TRIALS]
)
def test_random_plans_compute_what_the_reference_model_computes(name: str) -> None:
    job, said, covered = TRIALS[name]
    lines, judged = certified(job, *covered)
    assert said in lines[0]
    if name == "MTP":  # untied, with copies of the embedding next to the MTP layers
        assert "untied" in lines[0] and judged[0].coverage.collectives["embedding copies"] > 0


# Attention of GPUs as certify has it there, on a host without any.
EXACT = """
from megatron_epp.mcore.certify.rank import exact_attention
from megatron_epp.mcore.trainer.hooks import TrainerHooks
HOOKS = TrainerHooks(attention_for=exact_attention)
"""


@everything
@pytest.mark.parametrize(
    ("cp", "model", "batches"),
    [
        (1, V3, 4),
        (2, V3, 4),
        (1, LLAMA, 3),
        (2, LLAMA, 6),
    ],
)
def test_attention_by_the_kernels_of_gpus(cp, model, batches, tmp_path) -> None:
    exact = tmp_path / "exact.py"
    exact.write_text(EXACT)
    job = trial(Degrees(1, 1, 1, cp=cp), f"{model} --num-layers 2", batches=batches)
    certified(replace(job, interfere=exact), "cut", "packed")
