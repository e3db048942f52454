"""Hugging Face's config.json: located in a folder or in the cache, and parsed as JSON only.

This module does not access the network, and does not run code that a file names.
"""

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_epp.cost.catalogue.hub_families import FAMILIES, REFUSED, SAME, ModelFamily
from megatron_epp.cost.catalogue.named import read_json
from megatron_epp.cost.kinds.base import MOST
from megatron_epp.ir.errors import MOST_QUOTED, printable, quoted, shortened

CONFIG = "config.json"
MOST_LAYERS = 10_000
# Keys of the decoder in files with several parts, and keys of the other parts.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
_OTHER_PARTS = ("vision_config", "audio_config", "talker_config", "code2wav_config", "vision_tower")
# Keys with the number of MTP layers.
_MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# Files that are often next to a config.json, recognised by one of their keys.
_OTHER_FILES = {
    "peft_type": "an adapter's file; expected the config.json of the model that it adapts",
    "tokenizer_class": "a tokenizer's file; expected the model's config.json",
    "added_tokens": "a tokenizer's file; expected the model's config.json",
    "weight_map": "an index of weights; expected the model's config.json",
    "temperature": "a file of generation settings; expected the model's config.json",
}
# Names of sizes in GPT-2 and in repositories with code of their own.
_RENAMED = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_topk": "num_experts_per_tok",
    "moe_k": "num_experts_per_tok",
    "aux_loss_alpha": "router_aux_loss_coef",
    "hidden_activation": "hidden_act",
    "mlp_hidden_act": "hidden_act",
    "activation_function": "hidden_act",
    "layer_norm_eps": "norm_eps",
    "layer_norm_epsilon": "norm_eps",
    "norm_epsilon": "norm_eps",
    "rms_norm_eps": "norm_eps",
}


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Keys of the decoder in a config.json, with defaults of its model type.

    Attributes:
        where: name of the file in errors.
        name: name of the model, on one printable line.
        model_type: model type used to interpret the file.
        family: properties and defaults of this model type.
        keys: keys of the decoder with their values; every quantity has one key.
        notes: lines of text on parts of the file that were left out or not used.
        assumed: missing keys that were needed, with the values that were assumed.
        spelt: for keys that may have several names, the name that the file uses.
    """

    where: str
    name: str
    model_type: str
    family: ModelFamily
    keys: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    assumed: dict[str, Any] = field(default_factory=dict)
    spelt: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, key: str, problem: str) -> ValueError:
        """Return an error that names the file and ``key``, spelled as in the file."""
        return ValueError(f"{self.where}: {self.spelt.get(key, key)} {problem}")

    def value(self, key: str, rule: Any = None) -> Any:
        """Return the value of ``key`` in the file, else the family's default, else ``rule``."""
        if self.keys.get(key) is not None:
            return self.keys[key]
        defaults = {} if key in self.keys else _renamed(self.family.keys)  # null: no default
        taken = defaults.get(key, rule)
        neutral = taken in (None, [], "", {}) or (key not in defaults and taken in (0, 1))
        if key not in self.keys and not neutral:
            self.assumed[key] = taken
        return taken

    def size(self, key: str, rule: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return the integer at ``key``; a list of equal integers counts as one integer.

        Args:
            key: name of the key.
            rule: value if neither the file nor the family defines it; None: the key is required.
            least: lower bound.
            most: upper bound.

        Raises:
            ValueError: the value is missing, differs by layer, is not a whole number, or is out of
                bounds.
        """
        value = self.value(key, rule)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.refusal(key, "differs by layer; expected one number for all layers")
            value = value[0]
        if value is None:
            raise self.refusal(key, "is missing; expected a whole number")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(key, f"{quoted(value)}: expected a whole number")
        if not least <= value <= most:
            raise self.refusal(key, f"{quoted(value)}: expected {least} to {most}")
        return value

    def number(self, key: str, rule: float | None = None) -> float:
        """Return the number at ``key``, which must be finite and at least 0."""
        value = self.value(key, rule)
        return self.require_number(key, value)

    def require_number(self, key: str, value: Any) -> float:
        """Return ``value``; raise a ValueError unless it is a finite number of at least 0."""
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not 0 <= value <= 1e30:
            raise self.refusal(key, f"{quoted(value)}: expected a number of at least 0")
        return value

    def flag(self, key: str) -> bool:
        """Return the boolean at ``key``; false if neither the file nor the family defines it."""
        value = self.value(key, False)
        if not isinstance(value, bool):
            raise self.refusal(key, f"{quoted(value)}: expected true or false")
        return value

    def word(self, key: str) -> str:
        """Return the text at ``key``; empty if neither the file nor the family defines it."""
        value = self.value(key, "")
        if not isinstance(value, str):
            raise self.refusal(key, f"{quoted(value)}: expected a text")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return the object at ``key``; empty if neither the file nor the family defines it."""
        value = self.value(key, {})
        if not isinstance(value, Mapping):
            raise self.refusal(key, f"{quoted(value)}: expected an object")
        return value

    def by_layer(self, key: str, layers: int, kind: type) -> list | None:
        """Return the list of ``layers`` entries at ``key``; None if the key is missing."""
        value = self.keys.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(each) is not kind for each in value):
            expected = {str: "texts", int: "numbers"}[kind]
            raise self.refusal(key, f"{quoted(value)}: expected a list of {expected}")
        if len(value) != layers:
            raise self.refusal(key, f"of {len(value)} layers: expected {layers}")
        return value


def _renamed(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``keys`` with aliases renamed; if the new name is also a key, its value is used."""
    result = {_RENAMED[key]: value for key, value in keys.items() if key in _RENAMED}
    return result | {key: value for key, value in keys.items() if key not in _RENAMED}


def find_config(name: str) -> Path | None:
    """Return the path of the JSON file that ``name`` means; None if there is no such file.

    ``name`` is a file, a folder with a config.json, or ``org/name`` in Hugging Face's cache.

    Raises:
        ValueError: ``name`` is a folder without a config.json.
    """
    if not name or "\0" in name:
        return None
    path = Path(name)
    if os.path.isdir(name):
        path /= CONFIG
        if not os.path.exists(path):
            raise ValueError(f"model folder {name}: has no {CONFIG}; expected a model's folder")
        return path
    if os.path.exists(name):  # false, not an error, for a name that is too long
        return path
    if name.count("/") != 1 or name.endswith(".json") or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def is_hub_config(value: Any) -> bool:
    """Return whether a JSON value describes a model as transformers does."""
    return isinstance(value, Mapping) and bool({"model_type", "architectures"} & set(value))


def read_description(name: str, path: Path) -> Any:
    """Return the JSON value at ``path``; errors call it ``name``.

    Raises:
        ValueError: the file cannot be read, is not JSON, or is another known file, such as that of
            a tokenizer.
    """
    value = read_json("model", str(path))
    if isinstance(value, Mapping) and not is_hub_config(value):
        for key, what in _OTHER_FILES.items():
            if key in value:
                raise ValueError(f"model file {name}: {key}: is {what}")
    return value


def hub_config(name: str, value: Mapping[str, Any], like: str | None = None) -> HubConfig:
    """Return the HubConfig for a config.json that was parsed as ``value``.

    Args:
        name: file, folder or repository, as the user named it.
        value: JSON object.
        like: model type used to interpret the file, instead of the file's model_type.

    Raises:
        ValueError: the model type is missing, unknown or not supported, or the decoder's part of
            the file is not an object.
    """
    where = f"model file {name}"
    part, notes = _text_part(where, value)
    stated = part.get("model_type") or value.get("model_type")
    model_type = _known_type(where, like or stated, like is not None)
    if "auto_map" in value or "auto_map" in part:
        notes.append("auto_map: the code that it names is not used")
    if "quantization_config" in value or "quantization_config" in part:
        notes.append("quantization_config: ignored, training is in bf16")
    notes += [f"{key}: multi-token prediction, not counted" for key in _MTP if part.get(key)]
    tied = "tie_word_embeddings"
    rope = part.get("rope_parameters") or part.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    inside = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    keys = _renamed(inside | {**part}) | ({tied: value[tied]} if tied in value else {})
    title = _title(name, model_type)
    if like is not None:
        stated_name = printable(shortened(str(stated), MOST_QUOTED))
        title = f"{title}, read with --like {like}"
        notes.append(f"model_type {stated_name}: read with --like {like}")
    spelt = {_RENAMED[key]: key for key in part if key in _RENAMED}
    family = FAMILIES[model_type]
    return HubConfig(where, title, model_type, family, keys, tuple(notes), {}, spelt)


def _text_part(where: str, value: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the keys of the decoder, and notes on the other parts of the file."""
    notes = []
    part = value
    for _ in range(2):  # thinker_config.text_config
        for name in _TEXT_PARTS:
            if name in part and not isinstance(part[name], Mapping):
                raise ValueError(f"{where}: {name} {quoted(part[name])}: expected an object")
        inner = next((part[name] for name in _TEXT_PARTS if name in part), None)
        notes += [f"{name}: not counted" for name in _OTHER_PARTS if name in part]
        if inner is None:
            break
        part = inner
    return part, notes


def _known_type(where: str, stated: Any, asked: bool) -> str:
    """Return the key in FAMILIES for the model type ``stated``.

    ``asked`` is whether the type comes from --like; errors name the flag or the file accordingly.

    Raises:
        ValueError: the model type has no family.
    """
    what = "--like" if asked else f"{where}: model_type"
    if stated is None:
        raise ValueError(
            f"{what} is missing; expected one of transformers' model types, or --like MODEL_TYPE"
        )
    if not isinstance(stated, str):
        raise ValueError(f"{what} {quoted(stated)}: expected a text")
    for name in (stated, stated.removesuffix("_text")):
        if (name := SAME.get(name, name)) in FAMILIES:
            return name
    if stated in REFUSED:
        raise ValueError(f"{what} {quoted(stated)}: {REFUSED[stated]}; no kind of layer has that")
    known = sorted({*FAMILIES, *SAME})
    near = difflib.get_close_matches(stated, known, n=3) or ["llama"]
    cure = "expected one of" if asked else "read it as another with --like, such as"
    raise ValueError(f"{what} {quoted(stated)} is not known; {cure} {', '.join(near)}")


def _title(name: str, model_type: str) -> str:
    """Return a printable one-line name for the model that ``name`` means."""
    path = Path(name)
    if path.name == CONFIG:
        path = path.absolute().parent
    elif path.suffix == ".json":
        path = path.with_suffix("")
    stem = printable(shortened(path.name or path.absolute().name, MOST_QUOTED))
    return f"{stem} ({model_type})" if stem else model_type


def catalogue_config(name: str, keys: Mapping[str, Any]) -> HubConfig:
    """Return the config of a model of the catalogue; ``keys`` contain a model_type."""
    family = FAMILIES[keys["model_type"]]
    return HubConfig(f"model {name}", name, keys["model_type"], family, _renamed(keys))
