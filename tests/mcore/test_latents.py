"""Multi-latent attention under ``--epp``: trained, refused. Certified: test_certify_kinds.py."""

from argparse import Namespace

import pytest

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.mcore.kinds.mla.certificate import MLACertificate
from tests.mcore.certified import certified
from tests.mcore.models import V3
from tests.mcore.resumes import (
    Six,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_of,
)

# Attention of GPUs as certify has it there, on a host without any.
EXACT = """
from megatron_epp.mcore.certify.rank import exact_attention
from megatron_epp.mcore.trainer.hooks import TrainerHooks
HOOKS = TrainerHooks(attention_for=exact_attention)
"""


@pytest.mark.parametrize(
    ("cp", "model", "batches"),
    [
        (1, f"{V3} --epp-mla-keeps expanded", 4),
        (2, f"{V3} --epp-mla-keeps expanded", 4),
        (1, LLAMA, 3),
        (2, LLAMA, 6),
    ],
)
def test_attention_by_the_kernels_of_gpus(cp, model, batches, tmp_path) -> None:
    exact = tmp_path / "exact.py"
    exact.write_text(EXACT)
    models = (tuple(f"{model} --num-layers 2".split()),)
    _, judged = certified(Trial(Degrees(1, 1, 1, cp=cp), models, batches, interfere=exact))
    assert sum(batch.coverage.cut for batch in judged) > 0
    assert sum(batch.coverage.packed for batch in judged) > 0
    assert sum(batch.coverage.hybrid + batch.coverage.split for batch in judged) > 0


# ------------------------------------------------------------------ trained

MODEL = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "rotary_scaling_factor": 4,
    "mscale_all_dim": 1.0,
    "group_query_attention": None,
    "num_query_groups": None,
}
LENGTHS = [400, 30, 20, 90, 12, 60, 300, 8, 40, 33, 120, 77] * 4


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Six:
    model = {**MODEL, "epp_mla_keeps": "latents"}
    return six_of(tmp_path_factory.mktemp("six"), model, lengths=LENGTHS)


def test_three_and_three_are_six_bit_for_bit(six, tmp_path) -> None:
    saved = require_three_more_alike(six, tmp_path)
    # As Transformer Engine's layers name them.
    assert any(name.endswith("linear_kv_up_proj.layer_norm_weight") for name in saved)


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    """With Megatron's own projections and attention."""
    require_megatrons_own_numbers(tmp_path, {**MODEL, "pipeline_model_parallel_size": 1})


# ------------------------------------------------------------------ scaled down, refused


def sizes(**others) -> Namespace:
    given = {
        "multi_latent_attention": True,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "transformer_impl": "local",
    }
    return Namespace(**(given | others))


def test_the_small_model_has_the_heads_proportions() -> None:
    assert MLACertificate().small(sizes(), 64, 2, 8) == {
        "q_lora_rank": 14,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    }
    kind = MLACertificate()
    assert kind.small(sizes(v_head_dim=192, q_lora_rank=None), 64, 1, 8)["v_head_dim"] == 12
    assert "q_lora_rank" not in kind.small(sizes(q_lora_rank=None), 64, 1, 8)
    assert MLACertificate().small(Namespace(multi_latent_attention=False), 64, 1, 8) == {}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"kv_lora_rank": 0}, "--kv-lora-rank 0: expected at least 1"),
        (
            {"qk_pos_emb_head_dim": 3},
            "--qk-pos-emb-head-dim 3: an odd number of rotary channels of a head, times "
            "--rotary-percent; give an even one",
        ),
        (
            {"qk_pos_emb_head_dim": 6, "rotary_percent": 0.5},
            "--qk-pos-emb-head-dim 6: an odd number of rotary channels of a head, times "
            "--rotary-percent; give an even one",
        ),
        (
            {"kv_lora_rank": 511},
            "--kv-lora-rank 511 and --qk-pos-emb-head-dim 64: 575 channels do not divide over "
            "--tensor-model-parallel-size 2; expected a multiple of it",
        ),
        (
            {"q_lora_rank": 1535},
            "--q-lora-rank 1535: does not divide over --tensor-model-parallel-size 2; expected a "
            "multiple of it",
        ),
    ],
)
def test_sizes_that_cannot_be(wrong, line) -> None:
    with pytest.raises(ValueError) as refusal:
        MLACertificate().small(sizes(**wrong), 64, 2, 8)
    assert str(refusal.value) == line
