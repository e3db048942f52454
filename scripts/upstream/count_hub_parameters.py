#!/usr/bin/env python3
"""Parameters of published models, counted in transformers' models on torch's meta device.

    scripts/upstream/count_hub_parameters.py [NAME ...]

The script builds each model of tests/cost/hub_models.json without memory (half a minute for all).
It writes the numbers of parameters of the decoders, with embeddings, to
tests/cost/hub_parameters.json. Multi-token prediction and encoders are not built. Without a NAME,
it writes the default values of the classes to tests/cost/hub_defaults.json. Tests compare this
project's reading of config.json with both files.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
RECORDED = ROOT / "tests" / "cost" / "hub_parameters.json"
DEFAULTS = RECORDED.with_name("hub_defaults.json")
# Read by another class: of repositories with code of their own, and of text parts.
CLASSES = {"kimi_k2": "deepseek_v3", "qwen2_5_vl": "qwen2", "qwen3_vl_moe_text": "qwen3_moe"}


def parameters(keys: dict[str, Any]) -> int:
    """Return the number of parameters of the decoder that transformers builds from ``keys``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    top, text = keys, keys.get("text_config", keys)
    text = {
        name: value for name, value in text.items() if name not in ("auto_map", "architectures")
    }
    if "tie_word_embeddings" in top:
        text["tie_word_embeddings"] = top["tie_word_embeddings"]
    for unused in ("vision_config", "quantization_config"):
        text.pop(unused, None)
    model_type = text.pop("model_type")
    if (text.get("rope_scaling") or {}).get("type") == "mrope":
        text.pop("rope_scaling")
    for name, value in list(text.items()):  # of a list the one that all layers have
        if name in ("moe_topk", "moe_intermediate_size", "num_shared_expert") and isinstance(
            value, list
        ):
            text[name] = value[0]
    config = AutoConfig.for_model(CLASSES.get(model_type, model_type), **text)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    named = {id(each): each for name, each in model.named_parameters() if ".mtp" not in name}
    return sum(each.numel() for each in named.values())


def class_defaults(model_type: str) -> dict[str, Any]:
    """Return the defaults of transformers' class for keys missing in a file of ``model_type``."""
    from transformers import CONFIG_MAPPING

    from megatron_epp.cost.catalogue.hub_families import FAMILIES

    values = CONFIG_MAPPING[model_type]().to_dict()
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    known = {**rope, **values}
    return {key: known[key] for key in FAMILIES[model_type].keys if key in known}


def main() -> int:
    """Count, print and record the parameters; return the exit status."""
    from tests.cost.hub_models import HUB_MODELS

    chosen = sys.argv[1:] or list(HUB_MODELS)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name in chosen:
        recorded[name] = parameters(HUB_MODELS[name].keys)
        print(f"{name:24} {recorded[name]:>16,}", flush=True)
        kept = {name: recorded[name] for name in HUB_MODELS if name in recorded}
        RECORDED.write_text(json.dumps(kept, indent=1) + "\n")
    if not sys.argv[1:]:
        from megatron_epp.cost.catalogue.hub_families import FAMILIES

        defaults = {each: class_defaults(each) for each in FAMILIES if each not in CLASSES}
        DEFAULTS.write_text(json.dumps(defaults, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
