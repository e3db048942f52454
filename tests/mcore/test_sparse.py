"""DeepSeek sparse attention under ``--epp``: trained, refused. Certified: test_certify_kinds.py."""

import math
from argparse import Namespace

import pytest

from megatron_epp.mcore.kinds.dsa.certificate import DSACertificate
from megatron_epp.mcore.kinds.dsa.kind import DSAKind
from tests.mcore.resumes import require_megatrons_own_numbers
from tests.mcore.test_latents import MODEL

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
    # Terms of unit size cancel to it: scores begin nearly alike, in float32.
    losses = {"indexer loss": 1e-3}
    require_megatrons_own_numbers(tmp_path, TRAINED, others=losses)


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
