"""Models of transformers' config.json: their sizes, what a file leaves out, what is refused.

Facts of the models are in hub_models.json; what they are compared with was counted in transformers'
own classes by scripts/upstream/count_hub_parameters.py.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_epp.cost.catalogue.hub_families import FAMILIES, REFUSED, SAME
from megatron_epp.cost.catalogue.hub_file import find_config, hub_config
from megatron_epp.cost.catalogue.megatron_flags import model_flags
from megatron_epp.cost.catalogue.models import MODELS, Model, hub_model, model, model_config
from tests.cost.hub_models import HUB_MODELS

FOLDER = Path(__file__).parent
COUNTED = json.loads((FOLDER / "hub_parameters.json").read_text())
DEFAULTS = json.loads((FOLDER / "hub_defaults.json").read_text())
# The cost model counts neither learned positions nor biases, which are 0.16% of this small model.
ALLOWED = {"gpt2-xl": 0.002}
# Defaults whose keys transformers' class has by another name, or not at all.
RENAMED = {
    ("qwen3_moe", "num_experts"),
    ("glm4_moe_lite", "first_k_dense_replace"),
    ("gemma", "hidden_activation"),
    ("gemma3_text", "rope_local_base_freq"),
}
# Keys that say nothing of a decoder that is trained, whatever they are.
IGNORED = {
    "architectures",
    "auto_map",
    "quantization_config",
    "vision_config",
    "num_nextn_predict_layers",  # multi-token prediction is left out
    "mtp_num_hidden_layers",
    "n_positions",
    "mrope_section",  # of text alone the parts of a position are alike
    "mrope_interleaved",
    "type",  # of a rope_scaling that has a rope_type, too
}
# Keys that models of these names do not ask: latents have no groups of heads, windows are off or
# of layers beyond the last, one group of experts is none, and the part of a file with the decoder
# says what it is.
NESTED = ("llama-4", "mistral-small", "qwen3-vl", "qwen3.5", "gemma-3")
NOT_ASKED = {
    "num_key_value_heads": ("deepseek", "kimi", "glm-5", "glm-4.7-flash"),
    "use_sliding_window": ("qwen2.5",),
    "sliding_window": ("qwen2.5",),
    "max_window_layers": ("qwen2.5",),
    "mlp_only_layers": ("qwen3-30b", "qwen3-vl"),
    "topk_method": ("deepseek-v2-lite",),
    "topk_group": ("kimi", "glm-4.7"),
    "n_shared_experts": ("nemotron",),  # whose width is of all of them
    "use_qk_norm": ("minimax",),  # which no flag says
    "model_type": NESTED,
}


def read(name: str) -> Model:
    return hub_model(hub_config(f"{name}/config.json", HUB_MODELS[name].keys))


def said(name: str, keys: dict[str, Any]) -> str:
    """All that is made of ``keys``: the model and its flags, or why it is refused."""
    try:
        config = hub_config(f"{name}/config.json", keys)
        shape = hub_model(config)
        flags = model_flags(shape, config)
    except ValueError as error:
        return f"refused: {error}"
    return repr((shape, flags.groups, flags.unsaid))


@pytest.mark.parametrize("name", HUB_MODELS)
def test_parameters_are_those_of_transformers(name) -> None:
    assert read(name).parameters == pytest.approx(COUNTED[name], rel=ALLOWED.get(name, 0.001))


def test_the_table_is_as_large_as_it_says() -> None:
    assert len(HUB_MODELS) >= 45 and set(HUB_MODELS) == set(COUNTED)
    assert all(each.source.startswith("https://") for each in HUB_MODELS.values())
    types = {hub_config("x", each.keys).model_type for each in HUB_MODELS.values()}
    untried = set(FAMILIES) - types
    assert untried == {"glm", "granitemoeshared", "hunyuan_v1_dense"}  # as their neighbours


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_the_class(model_type) -> None:
    ours = dict(FAMILIES[model_type].keys)
    for key in [key for key in ours if (model_type, key) in RENAMED]:
        del ours[key]
    assert ours == DEFAULTS[model_type]


def _changed(value: Any) -> Any:
    """A value of the same type that means something else."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 2 if value else 1
        case str():
            return {"silu": "relu2", "relu2": "silu"}.get(value, "another")
        case list():
            return [_changed(each) for each in value]
        case None:
            return 64
    return value


def _mutants(keys: dict[str, Any]):
    """(key, other keys) of every key, those within objects, too."""
    for key, value in keys.items():
        if isinstance(value, dict) and key not in IGNORED:
            for inner, mutant in _mutants(value):
                yield inner, {**keys, key: mutant}
        else:
            yield key, {**keys, key: _changed(value)}


@pytest.mark.parametrize("name", HUB_MODELS)
def test_each_key_counts(name) -> None:
    """Each key changes the model or its flags, or is refused, or is on one of the lists."""
    keys = HUB_MODELS[name].keys
    before = said(name, keys)
    assert not before.startswith("refused")
    silent = {key for key, mutant in _mutants(keys) if said(name, mutant) == before}
    excused = {key for key, names in NOT_ASKED.items() if name.startswith(names)}
    assert silent <= IGNORED | excused


BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}


REFUSED_KEYS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"hidden_size": None}, "hidden_size is missing; expected a whole number"),
    ({"hidden_size": "64"}, "hidden_size '64': expected a whole number"),
    ({"hidden_size": 1e300}, "hidden_size 1e+300: expected a whole number"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000: expected 1 to 10000"),
    ({"num_hidden_layers": True}, "num_hidden_layers True: expected a whole number"),
    ({"num_attention_heads": 0}, "num_attention_heads 0: expected 1 to 1000000000"),
    ({"num_attention_heads": 5}, "num_attention_heads 5: expected a divisor of 64"),
    ({"num_key_value_heads": 3}, "kv_heads 3: expected a divisor of heads, 4"),
    ({"num_key_value_heads": [4, 2]}, "differs by layer; expected one number for all layers"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings 1: expected true or false"),
    ({"layer_types": ["full_attention"]}, "layer_types of 1 layers: expected 2"),
    (
        {"layer_types": ["full_attention", "conv"]},
        "layer_types 'conv': no kind of layer has that; known: full_attention, attention, "
        "indexed_attention, chunked_attention, sliding_attention, linear_attention",
    ),
    ({"model_type": 7}, "model_type 7: expected a text"),
    ({"model_type": None, "architectures": []}, "model_type is missing; expected one of"),
    ({"model_type": "lfm2"}, "'lfm2': short convolutions; no kind of layer has that"),
    (
        {"model_type": "qwen3_mo"},
        "model_type 'qwen3_mo' is not known; read it as another with --like, such as qwen3_moe",
    ),
    ({"text_config": 5}, "text_config 5: expected an object"),
    # Keys of flags alone.
    ({"rope_theta": "1e4"}, "rope_theta '1e4': expected a number"),
    ({"rms_norm_eps": -1}, "rms_norm_eps -1: expected a number"),
    ({"rope_scaling": 3}, "rope_scaling 3: expected an object"),
    ({"rope_scaling": {"type": "llama3"}}, "rope_scaling.factor None: expected a number"),
    ({"hidden_act": 5}, "hidden_act 5: expected a text"),
)
REFUSED_FILES = (
    ('{"model_type": "llama", "hidden_size": NaN}', "NaN is not a number"),
    ('{"model_type": ' + "[" * 100_000, "no JSON"),
    ('{"model_type": "llama", "hidden_size": ' + "9" * 40 + "}", "whole number of 40 digits"),
    ('{"peft_type": "LORA", "r": 8}', "peft_type: is an adapter's file"),
    ('{"tokenizer_class": "X"}', "tokenizer_class: is a tokenizer's file"),
    ('["llama"]', "expected a JSON object"),
)


@pytest.mark.parametrize(
    ("text", "says"),
    [*((json.dumps({**BASE, **keys}), says) for keys, says in REFUSED_KEYS), *REFUSED_FILES],
)
def test_what_is_refused_is_one_line(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refusal:
        model_flags(model(str(path)), model_config(str(path)))
    line = str(refusal.value)
    assert says in line and "\n" not in line and str(path) in line


def test_code_of_a_repository_is_named_and_never_run(tmp_path) -> None:
    planted = tmp_path / "modeling.py"
    planted.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {**BASE, "auto_map": {"AutoConfig": "modeling.Config"}, "trust_remote_code": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model(str(tmp_path)).hidden == 64
    found = model_config(str(tmp_path))
    assert found is not None and found.notes == ("auto_map: the code that it names is not used",)
    assert not (tmp_path / "ran").exists() and "modeling" not in sys.modules


def test_what_the_file_lacks_is_remembered() -> None:
    config = hub_config("x/config.json", BASE)
    hub_model(config)
    assert config.assumed == {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }


def test_parts_other_than_the_decoder_are_named() -> None:
    nested = {"model_type": "qwen3_vl", "text_config": {**BASE, "model_type": "qwen3_vl_text"}}
    config = hub_config("x", {**nested, "vision_config": {"depth": 2}, "tie_word_embeddings": True})
    assert config.model_type == "qwen3" and config.notes == ("vision_config: not counted",)
    assert hub_model(config).tied
    twice = {"model_type": "qwen3_omni_moe", "thinker_config": nested, "talker_config": {}}
    assert hub_config("x", twice).notes == ("talker_config: not counted",)
    assert hub_config("x", twice).keys["hidden_size"] == 64


def test_another_model_type_is_read_as_one_that_is_known(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "new\n"}))
    with pytest.raises(ValueError, match=r"model_type 'new\\n' is not known; .* --like"):
        model(str(tmp_path))
    found = model(str(tmp_path), "llama")
    assert found.name.endswith("(llama), read with --like llama") and found.layers == 2
    with pytest.raises(ValueError, match="--like 'llamma' is not known"):
        model(str(tmp_path), "llamma")
    with pytest.raises(ValueError, match="--like llama: qwen3-8b is not a config"):
        model("qwen3-8b", "llama")


def test_a_name_is_found_in_the_cache_alone(tmp_path, monkeypatch) -> None:
    """Where huggingface_hub is installed; a stand-in notes what it is asked."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BASE))
    asked = []
    hub, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")

    def cached(repository: str, file: str) -> str | None:
        asked.append((repository, file))
        return str(path) if repository == "org/there" else None

    vars(hub)["try_to_load_from_cache"] = cached
    vars(errors)["HFValidationError"] = type("HFValidationError", (ValueError,), {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.setattr("megatron_epp.cost.catalogue.hub_file.find_spec", lambda name: True)
    assert model("org/there").name == "there (llama)"
    assert asked == [("org/there", "config.json")]
    with pytest.raises(ValueError, match=r"org/absent.* `hf download org/absent config[.]json`"):
        model("org/absent")
    assert find_config("a/b/c") is None and find_config("a/b.json") is None


def test_names_are_one_printable_line_and_no_other_models(tmp_path) -> None:
    folder = tmp_path / "gpt-7b"  # the name of another model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE))
    assert model(str(folder)).name == "gpt-7b (llama)"
    odd = tmp_path / "a\n$(id)\x1b[0m"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps(BASE))
    assert model(str(odd)).name.isprintable()
    with pytest.raises(ValueError, match=r"has no config.json"):
        model(str(tmp_path))


def test_every_model_type_is_one_of_its_kind() -> None:
    assert set(SAME.values()) <= set(FAMILIES)
    assert not set(REFUSED) & {*FAMILIES, *SAME}


def test_the_catalogue_knows_how_its_models_are_launched() -> None:
    without = {name for name in MODELS if model_config(name) is None}
    assert without == {"gpt-7b", "gpt-13b", "gpt-30b"}  # papers that say sizes alone
