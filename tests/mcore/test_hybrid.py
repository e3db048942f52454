"""HybridModel under ``--epp``: trained, refused. Certified: test_certify_kinds.py."""

from argparse import Namespace

import pytest

from megatron_epp.cost.kinds.base import CarryOver
from megatron_epp.mcore.certify.layer_selection import small_kinds
from megatron_epp.mcore.hybrid.pattern import layers_of_stages
from megatron_epp.mcore.kinds.registry import require_pattern
from megatron_epp.mcore.model.shape import layer_shapes, model_shape
from megatron_epp.mcore.trainer.profile_command import _layers, _one_of_each_kind
from tests.mcore.models import TRAINED_MOE, TRAINED_SSM
from tests.mcore.resumes import (
    Six,
    after_three,
    require_megatrons_own_numbers,
    require_three_more_alike,
    six_of,
    to_megatron_and_back,
)

PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")

# ------------------------------------------------------------------ trained

# A layer of every kind, and a further token predicted.
MODEL = {**TRAINED_SSM, **TRAINED_MOE, "hybrid_layer_pattern": "*-EM|GE/*-"}


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> Six:
    return six_of(tmp_path_factory.mktemp("six"), MODEL, PROGRAM)


def test_three_and_three_are_six_bit_for_bit(six, tmp_path) -> None:
    saved = require_three_more_alike(six, tmp_path)
    # As Transformer Engine's layers name them, which Megatron builds on GPUs.
    weights = {name.removeprefix(".") for name in saved if "exp_avg" not in name}
    for key in (
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.2.pre_mlp_layernorm.weight",
        "decoder.layers.3.mixer.in_proj.layer_norm_weight",
        "decoder.layers.4.self_attention.in_proj.layer_norm_weight",
        "decoder.final_norm.weight",
    ):
        assert any(name.endswith(key) for name in weights), (key, sorted(weights))


def test_checkpoints_load_both_ways(six, tmp_path) -> None:
    to_megatron_and_back(six.job, after_three(six.folder, tmp_path))


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    """Auxiliary losses, too."""
    model = {**MODEL, "pipeline_model_parallel_size": 1, "hybrid_layer_pattern": "*-E*--"}
    losses = dict.fromkeys(("seq_load_balancing_loss", "z_loss"), 1e-5)
    require_megatrons_own_numbers(tmp_path, model, program=PROGRAM, others=losses)


# ------------------------------------------------------------------ patterns


def given(pattern: str | None, stages: int = 1, **others) -> Namespace:
    wanted = {
        "hybrid_layer_pattern": pattern,
        "pipeline_model_parallel_size": stages,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "num_experts": None,
    }
    return Namespace(**(wanted | others))


def test_layers_of_stages_are_as_megatron_places_them() -> None:
    assert layers_of_stages(given("*-*-", 2)) == (2, 2)
    assert layers_of_stages(given("*-*|-", 2)) == (3, 1)
    assert layers_of_stages(given("*-|", 2)) == (2, 0)
    ends = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}
    assert layers_of_stages(given("*-*-*-*-", 4, **ends)) == (1, 2, 2, 3)
    require_pattern(given(None))
    require_pattern(given("*-E", num_experts=8))
    require_pattern(given(None, hybrid_override_pattern="*-"))
    require_pattern(given("*-|*-|*-|*-", 2))  # Megatron's own schedule interleaves them


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (given("*-x"), "--hybrid-layer-pattern *-x: 'x' is not a layer symbol; expected a letter"),
        (given(None, hybrid_override_pattern="?"), "'?' is not a layer symbol"),
        (given("|", 2), "--hybrid-layer-pattern |: no layer; expected a letter"),
        (given("*+-"), "attention (*) and latent attention (+) in one model"),
        (given("*E"), "layers of experts (E), and --num-experts is not given; expected both"),
        (given("*-", num_experts=8), "no layer of experts (E), and --num-experts 8"),
        (
            given("*-*-*", 2),
            "5 layers, of which 5 are left for 2 of --pipeline-model-parallel-size 2 stages; "
            "expected the same number for each, or | between the stages in the pattern",
        ),
        (
            given("*-|*|-", 2),
            "3 segments for --pipeline-model-parallel-size 2; expected 2, one for each stage",
        ),
        (given("*|-", 2, decoder_last_pipeline_num_layers=1), "its | say where stages end; leave"),
    ],
)
def test_patterns_that_cannot_be_are_one_line(wanted, says) -> None:
    with pytest.raises(ValueError) as refusal:
        require_pattern(wanted)
    said = str(refusal.value)
    assert says in said and said.startswith("--hybrid-layer-pattern ") and "\n" not in said


# ------------------------------------------------------------------ the model's shape


def shaped(pattern: str, **others) -> Namespace:
    args = Namespace(
        hybrid_layer_pattern=pattern,
        num_layers=len(pattern),
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        padded_vocab_size=1000,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        num_experts=None,
        moe_router_topk=2,
        moe_ffn_hidden_size=48,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        moe_layer_freq=1,
        window_size=None,
        window_attn_skip_freq=None,
        no_rope_freq=None,
        multi_latent_attention=False,
    )
    vars(args).update(others)
    return args


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
    pattern = size[0].partition("=")[2]
    args = shaped(pattern, num_layers=16, encoder_num_layers=16, num_experts=8)
    _one_of_each_kind(args, layers, 2)
    assert args.hybrid_layer_pattern == "*-E|*-E" and args.num_layers == 6
    assert model_shape(args).layer_kinds == ("attention", "mlp", "experts") * 2


def test_a_long_pattern_keeps_layers_of_every_letter() -> None:
    args = shaped("*-*-*-*-*E" * 2, num_experts=8)
    assert small_kinds(args, [10, 10], [6, 6])["hybrid_layer_pattern"] == "*-*-*E|*-*-*E"
    assert small_kinds(shaped("*-*-"), [2, 2], [2, 2])["hybrid_layer_pattern"] == "*-|*-"
