"""Flags of models by config.json: Megatron's parser reads the same model back."""

import argparse
import dataclasses
from collections.abc import Callable

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_epp.cost.catalogue.hub_file import hub_config
from megatron_epp.cost.catalogue.megatron_flags import model_flags
from megatron_epp.cost.catalogue.models import MODELS, Model, hub_model, model_config
from megatron_epp.mcore.job.read_flags import prepare_parser
from megatron_epp.mcore.model.shape import model_shape
from tests.cost.hub_models import HUB_MODELS

Parse = Callable[[list[str]], argparse.Namespace]
# What flags cannot say, of models whose sizes they can: another activation has no gate there.
NO_SHAPE = {"falcon-h1-7b"}  # attention and Mamba in one layer
NO_GATE = {"gemma-7b", "gemma-2-9b", "gemma-3-27b", "gemma3-27b"}


@pytest.fixture(scope="module")
def parse() -> Parse:
    """Megatron's own parser, which takes a third of a second to make."""
    parser = prepare_parser(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))

    def read(words: list[str]) -> argparse.Namespace:
        args = parser.parse_args(words)
        if args.num_layers is None:
            args.num_layers = len(args.hybrid_layer_pattern)
        return args

    return read


def comparable(model: Model) -> tuple[object, ...]:
    """All of a model but its name and what it calls its kinds of layers."""
    kinds = [model.kinds[kind] for kind in model.layer_kinds]
    return dataclasses.astuple(dataclasses.replace(model, name="x", kinds={}, pattern="")), kinds


def words_of(model: Model, flags: list[list[str]]) -> list[str]:
    common = ["--seq-length", "8192", "--micro-batch-size", "1", "--epp"]
    return [word for group in flags for word in group] + common


@pytest.mark.parametrize("name", [name for name in HUB_MODELS if name not in NO_SHAPE])
def test_megatrons_parser_reads_the_same_model(name, parse) -> None:
    config = hub_config(f"{name}/config.json", HUB_MODELS[name].keys)
    model = hub_model(config)
    flags = model_flags(model, config)
    args = parse(words_of(model, flags.groups))
    expected = dataclasses.replace(model, gated=False) if name in NO_GATE else model
    assert comparable(model_shape(args)) == comparable(expected)
    assert args.layernorm_epsilon == pytest.approx(config.value("norm_eps", 1e-5))
    if config.family.positions == "rope":
        assert args.rotary_base == round(config.value("rope_theta"))
        assert args.position_embedding_type in ("rope", "yarn")


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_catalogue_are_launched_as_they_are_planned(name, parse) -> None:
    model = MODELS[name]
    args = parse(words_of(model, model_flags(model, model_config(name)).groups))
    expected = dataclasses.replace(model, gated=False) if name in NO_GATE else model
    assert comparable(model_shape(args)) == comparable(expected)


def test_what_flags_cannot_say_is_named() -> None:
    unsaid = {}
    for name, published in HUB_MODELS.items():
        config = hub_config(name, published.keys)
        unsaid[name] = model_flags(hub_model(config), config).unsaid
    named = {name for name, lines in unsaid.items() if lines}
    assert named == NO_SHAPE | {name for name in NO_GATE if name in HUB_MODELS} | {
        *("llama-4-scout", "llama-4-maverick", "deepseek-v2", "glm-4-9b-0414", "olmo-2-7b"),
        *("olmo-3.1-32b", "olmoe-7b", "exaone-4-32b", "granite-3.1-8b", "granite-3.0-3b-a800m"),
        *("minimax-m2", "hunyuan-a13b", "command-r-35b", "command-r7b", "internlm3-8b"),
        "pythia-6.9b",
    }
    assert unsaid["gemma-2-9b"] == (
        "norms after attention and MLP",
        "embeddings times the root of hidden_size",
        "final_logit_softcapping 30.0",
        "attn_logit_softcapping 50.0",
        "hidden_act gelu_pytorch_tanh with a gate",
    )


@pytest.mark.parametrize(
    ("name", "keys", "kind", "coefficient", "z_loss"),
    [
        ("mixtral-8x7b", {}, "aux_loss", 0.02, None),
        ("mixtral-8x7b", {"router_aux_loss_coef": None}, "aux_loss", 1e-3, None),
        ("mixtral-8x7b", {"router_aux_loss_coef": 0.0}, "none", 0.0, None),
        ("mixtral-8x7b", {"router_z_loss_coef": 0.002}, "aux_loss", 0.02, 0.002),
        ("gpt-oss-20b", {}, "aux_loss", 0.9, None),
        ("llama-4-scout", {}, "aux_loss", 1e-3, None),
        ("olmoe-7b", {}, "aux_loss", 0.01, None),
        ("deepseek-v3", {}, "seq_aux_loss", 1e-3, None),
        ("deepseek-v3", {"seq_aux": False}, "aux_loss", 1e-3, None),
        ("glm-4.5-air", {}, "seq_aux_loss", 1e-4, None),  # neither file nor class states one
    ],
)
def test_losses_of_routers_are_those_of_the_file(
    name, keys, kind, coefficient, z_loss, parse
) -> None:
    config = hub_config(name, {**HUB_MODELS[name].keys, **keys})
    model = hub_model(config)
    args = parse(words_of(model, model_flags(model, config).groups))
    assert args.moe_router_load_balancing_type == [kind]
    assert args.moe_aux_loss_coeff in (coefficient, [coefficient])
    assert args.moe_z_loss_coeff == z_loss


@pytest.mark.parametrize(
    ("name", "scaling", "unsaid"),
    [
        ("llama-2-7b", {"type": "dynamic", "factor": 2.0}, "RoPE of type dynamic, factor 2.0"),
        ("llama-2-7b", {"type": "linear", "factor": 2.5}, "RoPE of type linear, factor 2.5"),
        ("deepseek-v3", {"type": "llama3", "factor": 8.0}, "RoPE of type llama3, factor 8.0"),
        (
            "llama-2-7b",
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.5,
            },
            "rope_scaling.attention_factor 1.5",
        ),
    ],
)
def test_a_scaling_of_rope_without_a_flag_is_named(name, scaling, unsaid) -> None:
    config = hub_config(name, {**HUB_MODELS[name].keys, "rope_scaling": scaling})
    assert unsaid in model_flags(hub_model(config), config).unsaid


def test_a_router_with_noise_is_named() -> None:
    config = hub_config("x", {**HUB_MODELS["mixtral-8x7b"].keys, "router_jitter_noise": 0.1})
    assert model_flags(hub_model(config), config).unsaid == ("router_jitter_noise 0.1",)


def test_positions_by_their_rules(parse) -> None:
    """YaRN with and without latents, Llama 3's scaling, layers without positions."""

    def of(name: str) -> argparse.Namespace:
        config = hub_config(name, HUB_MODELS[name].keys)
        model = hub_model(config)
        return parse(words_of(model, model_flags(model, config).groups))

    oss, deepseek, llama = of("gpt-oss-20b"), of("deepseek-v3"), of("llama-3.2-1b")
    assert (
        oss.position_embedding_type == "yarn" and oss.yarn_original_max_position_embeddings == 4096
    )
    assert oss.rotary_scaling_factor == 32 and not oss.yarn_correction_range_round_to_int
    assert oss.window_size == (127, 0) and oss.softmax_type == "learnable" and oss.add_bias_linear
    assert deepseek.rope_type == "yarn" and deepseek.rotary_scaling_factor == 40
    assert (deepseek.mscale, deepseek.mscale_all_dim) == (1.0, 1.0)
    assert of("glm-5").rope_type == "rope" and of("glm-5").rotary_scaling_factor == 1
    assert llama.use_rope_scaling and llama.rope_scaling_factor == 32
    assert of("smollm3-3b").no_rope_freq == [0, 0, 0, 1] * 9
    assert of("qwen3-next-80b").rotary_percent == 0.25
    linear = {**HUB_MODELS["llama-2-7b"].keys, "rope_scaling": {"type": "linear", "factor": 4.0}}
    config = hub_config("x", linear)
    flags = model_flags(hub_model(config), config)
    interpolated = parse(words_of(hub_model(config), flags.groups))
    assert interpolated.rotary_seq_len_interpolation_factor == 4 and not flags.unsaid
    assert of("qwen2.5-7b").add_qkv_bias and not of("qwen2.5-7b").add_bias_linear
    qwen3 = of("qwen3-30b-a3b")
    assert qwen3.qk_layernorm and not llama.qk_layernorm
    assert qwen3.attention_dropout == qwen3.hidden_dropout == 0


@pytest.mark.parametrize(("vocabulary", "tp", "padded"), [(50257, 1, 50257), (50257, 2, 50432),
                                                          (151936, 8, 151936)])  # fmt: skip
def test_the_vocabulary_is_padded_where_it_does_not_divide(vocabulary, tp, padded) -> None:
    model = dataclasses.replace(MODELS["llama3-8b"], vocabulary=vocabulary)
    words = [word for group in model_flags(model, None, tp).groups for word in group]
    assert words[words.index("--padded-vocab-size") + 1] == str(padded)
