"""DeepSeek's sparse attention under ``--epp``: certified, broken on purpose, trained, refused."""

import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, draw, letters_drawn
from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_LATENTS
from megatron_epp.mcore.kinds.dsa.certificate import DSACertificate
from megatron_epp.mcore.kinds.dsa.kind import DSAKind
from tests.mcore.certified import certified
from tests.mcore.resumes import logged, require_megatrons_own_numbers
from tests.mcore.sabotages import first_seed, judged_alone, require_shown
from tests.mcore.test_latents import EXPERTS, LATENTS, MODEL, V3, latent_flags

SABOTAGE = Path(__file__).with_name("sabotage_sparse.py")
INDEXER = (
    "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 64 --dsa-indexer-topk 2048 "
    "--dsa-indexer-loss-coeff 0.1 "
)
SPARSE = f"--experimental-attention-variant dsa {INDEXER}"
AMONG = "--dsa-indexer-use-sparse-loss"

EVERY_DEGREE = {
    # DeepSeek-V3.2's: dense and then experts, the indexer taught on what it chose.
    "stages": Trial(
        Degrees(pp=2, tp=1, dp=1),
        tuple(
            tuple(f"{V3} {SPARSE} {EXPERTS} --num-layers 4 {loss}".split()) for loss in (AMONG, "")
        ),
        batches=6,
    ),
    "tensor-parallel ranks": Trial(
        Degrees(pp=1, tp=2, dp=1),
        tuple(
            tuple(f"{V3} {SPARSE} --num-layers 2 --sequence-parallel {loss}".split())
            for loss in ("", AMONG)
        ),
        batches=4,
    ),
    "a hybrid model": Trial(
        Degrees(pp=2, tp=1, dp=1),
        (
            tuple(
                f"{LATENTS} --q-lora-rank 384 --rope-type rope {INDEXER} {AMONG} "
                "--no-dsa-indexer-scoring-relu --hybrid-layer-pattern D-|D-".split()
            ),
        ),
        batches=2,
    ),
}


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    lines, judged = certified(EVERY_DEGREE[name])
    assert sum(batch.coverage.cut for batch in judged) > 0
    assert "indexer of 32 heads" in lines[0]


# ------------------------------------------------------------------ broken on purpose

WAYS = (
    "nothing",
    "lose gradients of the indexer",
    "lose gradients of latents",
    "choose among own keys",
    "choose another document s keys",
    "scale the loss by the chunk",
    "turn by the row",
    "nothing again",
)
FRAME = Frame(61, (2,), replicas=1, letters=letters_drawn(EXECUTABLE + OF_LATENTS), splits=True)


def fragile(number: int, seed: int) -> bool:
    """Whether a batch's plan has a slice behind a border, and a document behind another."""
    (plan,) = draw(seed, number, FRAME).step.plans
    chunks = range(len(plan.chunks))
    cut = any(slices_of(plan).later[chunk] >= 0 for chunk in chunks)
    return cut and any(len(plan.chunks[chunk].spans) > 1 for chunk in chunks)


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    model = f"{V3} {SPARSE} --num-layers 2"
    return judged_alone(model, WAYS, first_seed(len(WAYS), fragile), SABOTAGE)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_choices_show_and_right_ones_pass(judged, way) -> None:
    require_shown(judged[way], way)


# ------------------------------------------------------------------ trained

TRAINED = MODEL | {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 16,
    "dsa_indexer_loss_coeff": 0.1,
    "no_dsa_indexer_rotate_activation": True,
    "pipeline_model_parallel_size": 1,
}


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    """With Megatron's own attention and indexer, whose losses are logged."""
    ours, theirs = require_megatrons_own_numbers(tmp_path, TRAINED, words=latent_flags)
    taught = [logged("indexer loss", run.output) for run in (ours, theirs)]
    assert len(taught[1]) == 4 and min(taught[1]) > 0
    # Terms of unit size cancel to it: scores begin nearly alike, in float32.
    assert taught[0] == pytest.approx(taught[1], rel=1e-3)


# ------------------------------------------------------------------ refused


def given(**others) -> Namespace:
    values = {
        "experimental_attention_variant": "dsa",
        "multi_latent_attention": True,
        "hybrid_layer_pattern": None,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": True,
        "dsa_indexer_n_heads": 64,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "add_bias_linear": False,
    }
    return Namespace(**(values | others))


def test_the_small_indexer() -> None:
    assert DSACertificate().small(given(), 64, 2, 8) == {
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 7,
        "dsa_indexer_rotate_activation": False,
    }
    assert DSACertificate().small(Namespace(), 64, 2, 8) == {}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk is missing: sparse attention expects at"),
        ({"dsa_indexer_n_heads": 0}, "--dsa-indexer-n-heads 0: sparse attention expects at least"),
        ({"dsa_indexer_loss_coeff": math.nan}, "--dsa-indexer-loss-coeff nan: expected a finite"),
        ({"dsa_indexer_loss_coeff": -0.1}, "--dsa-indexer-loss-coeff -0.1: expected a finite"),
        ({"dsa_indexer_head_dim": 32}, "--dsa-indexer-head-dim 32: expected at least --qk-pos-emb"),
        ({"multi_latent_attention": False}, "dsa: expected --multi-latent-attention"),
        ({"add_bias_linear": True}, "its linears have no bias; give --disable-bias-linear"),
        ({"sequence_parallel": False}, "--tensor-model-parallel-size 2: give --sequence-parallel"),
        ({"q_lora_rank": None}, "give --q-lora-rank"),
        ({"epp_mla_keeps": "expanded"}, "attends in latents, and keeps them; leave the flag out"),
        ({}, "fast_hadamard_transform is missing; pip install fast-hadamard-transform, or give"),
    ],
)
def test_what_cannot_be_is_one_line(wrong, line) -> None:
    DSAKind().refuse(given(dsa_indexer_rotate_activation=False))
    with pytest.raises(ValueError) as refusal:
        DSAKind().refuse(given(**wrong))
    assert line in str(refusal.value) and "\n" not in str(refusal.value)
