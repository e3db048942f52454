"""Flags of every kind of layer: sizes that cannot be, the small model of a certificate."""

import math
from argparse import Namespace

import pytest

from megatron_epp.cost.kinds.base import CarryOver
from megatron_epp.mcore.certify.layer_selection import small_kinds
from megatron_epp.mcore.hybrid.pattern import layers_of_stages
from megatron_epp.mcore.kinds.dsa.certificate import DSACertificate
from megatron_epp.mcore.kinds.dsa.kind import DSAKind
from megatron_epp.mcore.kinds.mla.certificate import MLACertificate
from megatron_epp.mcore.kinds.moe.certificate import MoECertificate
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from megatron_epp.mcore.kinds.registry import require_pattern
from megatron_epp.mcore.model.shape import layer_shapes, model_shape
from megatron_epp.mcore.trainer.profile_command import _layers, _one_of_each_kind
from tests.mcore.models import megatron_args


def given(**changes) -> Namespace:
    """Args of a model without a kind of its own."""
    sizes = {"num_layers": 8, "hidden_size": 2048, "kv_channels": 16, "padded_vocab_size": 1000}
    sizes |= {"moe_router_topk": 8, "moe_ffn_hidden_size": 768, "pipeline_model_parallel_size": 1}
    return megatron_args(**(sizes | changes))


def moe(**changes) -> Namespace:
    return given(**{"num_experts": 128, **changes})


def mla(**changes) -> Namespace:
    """DeepSeek-V3's attention."""
    sizes = {
        "multi_latent_attention": True,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    }
    return given(**(sizes | changes))


def dsa(**changes) -> Namespace:
    sizes = {
        "experimental_attention_variant": "dsa",
        "qk_layernorm": True,
        "dsa_indexer_n_heads": 64,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "dsa_indexer_rotate_activation": False,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "add_bias_linear": False,
    }
    return mla(**(sizes | changes))


def pattern(symbols: str | None, stages: int = 1, **changes) -> Namespace:
    return given(hybrid_layer_pattern=symbols, pipeline_model_parallel_size=stages, **changes)


def small_mla(args: Namespace) -> dict[str, object]:
    return MLACertificate().small(args, 64, 2, 8)


def fits_experts(args: Namespace) -> None:
    MoEKind().require(args, 1)


ODD = "an odd number of rotary channels of a head, times --rotary-percent; give an even one"
MULTIPLE = "--tensor-model-parallel-size 2; expected a multiple of it"
# What asks, args that it refuses, the line or a part of it.
REFUSED = [
    (fits_experts, moe(num_experts=6, expert_model_parallel_size=4), "--num-experts 6: does not "
     "divide over --expert-model-parallel-size 4; expected a multiple of it"),
    (fits_experts, moe(num_experts=4),
     "--moe-router-topk 8: expected 1 to 4, the number of --num-experts"),
    (fits_experts, moe(num_experts=12, moe_router_num_groups=5), "--num-experts 12: does not "
     "divide into --moe-router-num-groups 5; expected a multiple of it"),
    (small_mla, mla(kv_lora_rank=0), "--kv-lora-rank 0: expected at least 1"),
    (small_mla, mla(qk_pos_emb_head_dim=3), f"--qk-pos-emb-head-dim 3: {ODD}"),
    (small_mla, mla(qk_pos_emb_head_dim=6, rotary_percent=0.5), f"--qk-pos-emb-head-dim 6: {ODD}"),
    (small_mla, mla(kv_lora_rank=511), "--kv-lora-rank 511 and --qk-pos-emb-head-dim 64: 575 "
     f"channels do not divide over {MULTIPLE}"),
    (small_mla, mla(q_lora_rank=1535), f"--q-lora-rank 1535: does not divide over {MULTIPLE}"),
    *((DSAKind().refuse, dsa(**wrong), said) for wrong, said in (
        ({"dsa_indexer_topk": None}, "--dsa-indexer-topk is missing: sparse attention expects at"),
        ({"dsa_indexer_n_heads": 0}, "--dsa-indexer-n-heads 0: sparse attention expects at least"),
        ({"dsa_indexer_loss_coeff": math.nan}, "--dsa-indexer-loss-coeff nan: expected a finite"),
        ({"dsa_indexer_loss_coeff": -0.1}, "--dsa-indexer-loss-coeff -0.1: expected a finite"),
        ({"dsa_indexer_head_dim": 32}, "--dsa-indexer-head-dim 32: expected at least --qk-pos-emb"),
        ({"multi_latent_attention": False}, "dsa: expected --multi-latent-attention"),
        ({"add_bias_linear": True}, "its linears have no bias; give --disable-bias-linear"),
        ({"sequence_parallel": False}, "--tensor-model-parallel-size 2: give --sequence-parallel"),
        ({"q_lora_rank": None}, "give --q-lora-rank"),
        ({"dsa_indexer_rotate_activation": True}, "fast_hadamard_transform is missing; pip install "
         "fast-hadamard-transform, or give"),
    )),
    *((require_pattern, wanted, said) for wanted, said in (
        (pattern("*-x"), "pattern *-x: 'x' is not a layer symbol; expected a letter"),
        (pattern(None, hybrid_override_pattern="?"), "'?' is not a layer symbol"),
        (pattern("|", 2), "--hybrid-layer-pattern |: no layer; expected a letter"),
        (pattern("*+-"), "attention (*) and latent attention (+) in one model"),
        (pattern("*E"), "layers of experts (E), and --num-experts is not given; expected both"),
        (pattern("*-", num_experts=8), "no layer of experts (E), and --num-experts 8"),
        (pattern("*-*-*", 2), "5 layers, of which 5 are left for 2 of "
         "--pipeline-model-parallel-size 2 stages; expected the same number for each, or | between "
         "the stages in the pattern"),
        (pattern("*-|*|-", 2),
         "3 segments for --pipeline-model-parallel-size 2; expected 2, one for each stage"),
        (pattern("*|-", 2, decoder_last_pipeline_num_layers=1), "its | say where stages end"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "args", "said"), REFUSED)
def test_what_cannot_be_is_one_line(ask, args, said) -> None:
    with pytest.raises(ValueError) as refusal:
        ask(args)
    line = str(refusal.value)
    assert said in line and "\n" not in line
    assert ask is not require_pattern or line.startswith("--hybrid-layer-pattern ")


def test_what_can_be_is_not_refused() -> None:
    fits_experts(moe())
    DSAKind().refuse(dsa())
    for fits in (
        pattern(None),
        pattern("*-E", num_experts=8),
        pattern(None, hybrid_override_pattern="*-"),
        pattern("*-|*-|*-|*-", 2),  # Megatron's own schedule interleaves them
    ):
        require_pattern(fits)


# ------------------------------------------------------------------ scaled down


def test_small_models_have_the_proportions_of_the_model() -> None:
    assert small_mla(mla()) == {
        "q_lora_rank": 14,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    }
    alone = MLACertificate().small(mla(v_head_dim=192, q_lora_rank=None), 64, 1, 8)
    assert alone["v_head_dim"] == 12 and "q_lora_rank" not in alone
    assert DSACertificate().small(dsa(), 64, 2, 8) == {
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 8,
        "dsa_indexer_topk": 7,
        "dsa_indexer_rotate_activation": False,
    }
    made = MoECertificate().small(moe(), 64, 1, 8)
    assert made == {"num_experts": 8, "moe_router_topk": 4, "moe_ffn_hidden_size": 24}
    latents = moe(moe_latent_size=512)
    assert MoECertificate().small(latents, 64, 1, 8) == {**made, "moe_latent_size": 16}
    groups = moe(num_experts=256, moe_router_num_groups=8, moe_router_group_topk=4)
    grouped = MoECertificate().small(groups, 64, 1, 8)
    assert grouped["moe_router_num_groups"] == 4 and grouped["moe_router_group_topk"] == 2
    assert grouped["moe_router_topk"] == 4 and grouped["num_experts"] % 4 == 0
    for kind in (MLACertificate(), DSACertificate(), MoECertificate()):
        assert kind.small(given(), 64, 1, 8) == {}


@pytest.mark.parametrize(
    ("frequency", "kept"),
    [([0] * 3 + [1] * 5, [0, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0] * 4 + [1] * 4, [0, 0, 1, 1])],
)
def test_a_stage_keeps_both_kinds_of_its_layers(frequency, kept) -> None:
    assert small_kinds(moe(moe_layer_freq=frequency), [4, 4], [2, 2])["moe_layer_freq"] == kept


def test_layers_are_kept_that_differ_most() -> None:
    """Of three kinds in a stage of which two are kept: with and without experts, and positions."""
    made = small_kinds(moe(moe_layer_freq=[0, 1] * 4, no_rope_freq=4), [4, 4], [2, 2])
    assert made == {"moe_layer_freq": [0, 1, 0, 1], "no_rope_freq": [0, 1, 0, 1]}
    with pytest.raises(ValueError) as error:
        small_kinds(moe(moe_layer_freq=[0, 1]), [8], [2])
    assert str(error.value) == "--moe-layer-freq: 2 layers; expected --num-layers, 8"


# ------------------------------------------------------------------ a layer pattern


def shaped(symbols: str, **changes) -> Namespace:
    sizes = {"num_layers": len(symbols), "hidden_size": 64, "moe_ffn_hidden_size": 48}
    return pattern(symbols, **{**sizes, "moe_router_topk": 2, **changes})


def test_layers_of_stages_are_as_megatron_places_them() -> None:
    assert layers_of_stages(pattern("*-*-", 2)) == (2, 2)
    assert layers_of_stages(pattern("*-*|-", 2)) == (3, 1)
    assert layers_of_stages(pattern("*-|", 2)) == (2, 0)
    ends = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    assert layers_of_stages(pattern("*-*-*-*-", 4, **ends)) == (1, 2, 2, 3)


def test_each_letter_is_a_kind_of_its_own() -> None:
    made = model_shape(shaped("*-*E*-", num_experts=8))
    assert made.layer_kinds == ("attention", "mlp", "attention", "experts", "attention", "mlp")
    attention, mlp, experts = made.shapes.values()
    assert attention.carried.channels == 64 and len(attention.parts) == 1
    assert mlp.carried == CarryOver() and mlp.flops_per_pair == 0 and len(mlp.parts) == 1
    assert experts.expert_parameters == 8 * 3 * 64 * 48 and experts.carried == CarryOver()
    windows = {"window_size": (16, 0), "window_attn_skip_freq": 3}
    made = model_shape(shaped("*-*-", **windows))  # layer 3 has none
    assert made.layer_kinds == ("window", "mlp", "attention", "mlp")
    assert model_shape(shaped("--")).layer_kinds == ("mlp", "mlp")
    assert [shape.attention for shape in layer_shapes(shaped("*-"))] == [True, False]


def test_a_profile_has_one_layer_of_every_letter_on_every_stage() -> None:
    layers, size = _layers(["--hidden-size", "8", "--hybrid-layer-pattern=*-*-|*-*E"], 2)
    assert (layers, size) == (8, ["--hybrid-layer-pattern=*-*-*-*E|*-*-*-*E"])
    assert _layers(["--num-layers", "4"], 2) == (4, ["--num-layers", "8"])
    symbols = size[0].partition("=")[2]
    args = shaped(symbols, num_layers=16, encoder_num_layers=16, num_experts=8)
    _one_of_each_kind(args, layers, 2)
    assert args.hybrid_layer_pattern == "*-E|*-E" and args.num_layers == 6
    assert model_shape(args).layer_kinds == ("attention", "mlp", "experts") * 2


def test_a_long_pattern_keeps_layers_of_every_letter() -> None:
    args = shaped("*-*-*-*-*E" * 2, num_experts=8)
    assert small_kinds(args, [10, 10], [6, 6])["hybrid_layer_pattern"] == "*-*-*E|*-*-*E"
    assert small_kinds(shaped("*-*-"), [2, 2], [2, 2])["hybrid_layer_pattern"] == "*-|*-"
