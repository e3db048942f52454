"""Layer shapes of the decoder that a config.json of transformers describes."""

from collections.abc import Sequence
from typing import Any

from megatron_epp.cost.catalogue.hub_file import MOST_LAYERS, HubConfig
from megatron_epp.cost.kinds.layer import LayerShape, kind_names
from megatron_epp.cost.kinds.ssm import TAPS
from megatron_epp.cost.layer_kinds import format_kinds
from megatron_epp.ir.errors import quoted

FULL, WINDOW, LINEAR = "full", "window", "linear"
# Attention range of the mixers in `layer_types`.
_SEES = {
    "full_attention": FULL,
    "attention": FULL,
    "indexed_attention": FULL,
    "chunked_attention": FULL,
    "sliding_attention": WINDOW,
    "linear_attention": LINEAR,
}
# Layer symbols of a HybridModel, as in Nemotron-H's files, and their names in newer files.
MAMBA, MLP, MOE, ATTENTION = "M", "-", "E", "*"
_BLOCKS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "mlp": MLP,
    "moe": MOE,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
}


def model_fields(config: HubConfig) -> dict[str, Any]:
    """Return the fields of models.Model for the decoder that ``config`` describes.

    Multi-token prediction and parts other than the decoder are left out.

    Raises:
        ValueError: a key is missing or wrong; the message names the file.
    """
    hidden = config.size("hidden_size")
    shapes = hub_layers(config)
    names = kind_names(shapes)
    if config.model_type == "mamba2":  # no attention and no MLP: these sizes are not used
        heads, head_size = config.size("num_heads"), config.size("head_dim")
        key_heads, ffn = heads, 4 * hidden
    else:
        heads = config.size("num_attention_heads")
        key_heads = config.size("num_key_value_heads", heads)
        head_size = _head_size(config, hidden, heads)
        ffn = _dense_hidden(config)
    if config.value("kv_lora_rank") is not None:
        key_heads = heads
    return {
        "name": config.name,
        "layers": len(shapes),
        "hidden": hidden,
        "ffn_hidden": ffn,
        "heads": heads,
        "kv_heads": key_heads,
        "head_size": head_size,
        "vocabulary": config.size("vocab_size"),
        "gated": config.family.gated,
        "tied": config.flag("tie_word_embeddings"),
        "kinds": {names[shape]: shape for shape in shapes} if names else {},
        "pattern": format_kinds([names[shape] for shape in shapes]) if names else "",
    }


def hub_layers(config: HubConfig) -> list[LayerShape]:
    """Return the shape of each layer, in order."""
    if config.model_type == "nemotron_h":
        symbols = hybrid_symbols(config)
        shapes = {symbol: _hybrid_shape(config, symbol) for symbol in dict.fromkeys(symbols)}
        return [shapes[symbol] for symbol in symbols]
    layers = _layers(config)
    if config.model_type == "mamba2":
        inner = config.size("num_heads") * config.size("head_dim")
        if inner != config.size("expand") * config.size("hidden_size"):
            raise config.refusal("num_heads", "x head_dim: expected expand x hidden_size")
        mamba = _mamba(config, "num_heads", "n_groups", "state_size", "head_dim")
        return [LayerShape(attention=False, mlp=False, **mamba)] * layers
    parallel: dict[str, Any] = {}
    if config.model_type == "falcon_h1":
        names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head")
        parallel = _mamba(config, *names)
    pairs = list(zip(mixers_of_layers(config), experts_mask(config), strict=True))
    known = {
        (sees, experts): LayerShape(
            **_mixer(config, sees), **_feed_forward(config, experts), **parallel
        )
        for sees, experts in dict.fromkeys(pairs)
    }
    return [known[pair] for pair in pairs]


def _layers(config: HubConfig) -> int:
    return config.size("num_hidden_layers", most=MOST_LAYERS)


def _head_size(config: HubConfig, hidden: int, heads: int) -> int:
    if config.value("kv_lora_rank") is not None:
        return config.size("qk_nope_head_dim")
    if config.value("head_dim") is None and hidden % heads:
        raise config.refusal("num_attention_heads", f"{heads}: expected a divisor of {hidden}")
    return config.size("head_dim", hidden // heads)


def _dense_hidden(config: HubConfig) -> int:
    """Return the hidden size of dense MLPs, even if no layer has a dense MLP."""
    if config.value("intermediate_size_mlp") is not None:
        return config.size("intermediate_size_mlp")
    if config.model_type in ("gpt2", "gpt_neox"):
        return config.size("intermediate_size", 4 * config.size("hidden_size"))
    if config.value("intermediate_size") is None and config.value("moe_intermediate_size"):
        return config.size("moe_intermediate_size")
    return config.size("intermediate_size")


# ------------------------------------------------------------------ mixers


def mixers_of_layers(config: HubConfig) -> list[str]:
    """Return the type of every layer's mixer: FULL, WINDOW or LINEAR attention.

    Raises:
        ValueError: the file has an unknown layer type, or a key is missing or wrong.
    """
    layers = _layers(config)
    named = config.by_layer("layer_types", layers, str)
    if named is not None:
        for each in named:
            if each not in _SEES:
                problem = f"{quoted(each)}: no kind of layer has that; known: {', '.join(_SEES)}"
                raise config.refusal("layer_types", problem)
        sees = [_SEES[each] for each in named]
        return sees if _windows(config) else [FULL if each == WINDOW else each for each in sees]
    if config.value("linear_num_value_heads") is not None:
        every = config.size("full_attention_interval", 4)
        return [FULL if number % every == 0 else LINEAR for number in range(1, layers + 1)]
    if not _windows(config):
        return [FULL] * layers
    if "use_sliding_window" in config.family.keys:
        first = config.size("max_window_layers", layers, least=0)
        return [WINDOW if at >= first else FULL for at in range(layers)]
    every = _full_every(config)
    return [FULL if every and n % every == 0 else WINDOW for n in range(1, layers + 1)]


def _windows(config: HubConfig) -> bool:
    """Return whether some layers have a sliding window."""
    if "use_sliding_window" in config.family.keys and not config.flag("use_sliding_window"):
        return False
    return config.value("sliding_window") not in (None, 0)


def _full_every(config: HubConfig) -> int:
    """Return n if every n-th layer has full attention; 0 if no layer has full attention."""
    pattern = config.value("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return pattern.index("G") + 1 if "G" in pattern else 0
    if pattern is not None:
        return config.size("sliding_window_pattern")
    return config.family.full_every


def _mixer(config: HubConfig, sees: str) -> dict[str, Any]:
    """Return the sizes of a layer's mixer; ``sees`` is its type: FULL, WINDOW or LINEAR."""
    if sees == LINEAR:
        return {
            "attention": False,
            "delta_heads": config.size("linear_num_value_heads"),
            "state_groups": config.size("linear_num_key_heads"),
            "state_keys": config.size("linear_key_head_dim"),
            "state_values": config.size("linear_value_head_dim"),
        } | _require_taps(config, "linear_conv_kernel_dim")
    sizes: dict[str, Any] = {"window": config.size("sliding_window")} if sees == WINDOW else {}
    if config.family.output_gate and config.value("attn_output_gate", True):
        sizes["output_gate"] = True
    if config.value("kv_lora_rank") is None:
        return sizes
    query = config.value("q_lora_rank")
    sizes |= {
        "kv_rank": config.size("kv_lora_rank"),
        "query_rank": 0 if query is None else config.size("q_lora_rank", least=0),
        "rotary_size": config.size("qk_rope_head_dim"),
        "value_size": config.size("v_head_dim"),
    }
    if config.family.dsa:
        sizes["index_heads"] = config.size("index_n_heads")
        sizes["index_size"] = config.size("index_head_dim")
        sizes["chosen_keys"] = config.size("index_topk")
    return sizes


def _mamba(config: HubConfig, heads: str, groups: str, keys: str, values: str) -> dict[str, Any]:
    """Return the sizes of Mamba-2; the arguments are names of keys in ``config``."""
    sizes = {
        "mamba_heads": config.size(heads),
        "state_groups": config.size(groups),
        "state_keys": config.size(keys),
        "state_values": config.size(values, _inner(config, config.size(heads))),
    }
    inner = sizes["mamba_heads"] * sizes["state_values"]
    if config.value("mamba_d_ssm") not in (None, inner):
        raise config.refusal("mamba_d_ssm", f"expected {inner}, {heads} x {values}")
    taps = "mamba_d_conv" if config.model_type == "falcon_h1" else "conv_kernel"
    return sizes | _require_taps(config, taps)


def _inner(config: HubConfig, heads: int) -> int | None:
    """Return the channels per head, ``mamba_d_ssm`` / ``heads``; None without ``mamba_d_ssm``."""
    every = config.value("mamba_d_ssm")
    return None if every is None else config.size("mamba_d_ssm") // heads


def _require_taps(config: HubConfig, key: str) -> dict[str, Any]:
    if (taps := config.size(key)) != TAPS:
        raise config.refusal(key, f"{taps}: expected {TAPS}; no kind of layer has another")
    return {}


# ------------------------------------------------------------------ feed-forward sublayers


def experts_mask(config: HubConfig) -> list[bool]:
    """Return for every layer whether it has experts instead of a dense MLP."""
    layers = _layers(config)
    if config.value("num_experts") in (None, 0):
        return [False] * layers
    if (named := config.by_layer("mlp_layer_types", layers, str)) is not None:
        return [each == "sparse" for each in named]
    if (mask := config.keys.get("moe_layer_freq")) is not None and isinstance(mask, list):
        return [bool(each) for each in config.by_layer("moe_layer_freq", layers, int) or ()]
    if config.value("interleave_moe_layer_step") is not None:
        every = config.size("interleave_moe_layer_step")
        return [number % every == 0 for number in range(1, layers + 1)]
    if config.value("decoder_sparse_step") is not None:
        every, dense = config.size("decoder_sparse_step"), config.value("mlp_only_layers", [])
        if not isinstance(dense, list):
            raise config.refusal("mlp_only_layers", f"{quoted(dense)}: expected a list")
        return [at not in dense and (at + 1) % every == 0 for at in range(layers)]
    first = config.size("first_k_dense_replace", 0, least=0)
    every = config.size("moe_layer_freq", 1)
    return [at >= first and at % every == 0 for at in range(layers)]


def expert_width(config: HubConfig) -> int:
    """Return the hidden size of a routed expert."""
    if config.value("moe_intermediate_size") is not None:
        return config.size("moe_intermediate_size")
    return config.size("intermediate_size")


def _feed_forward(config: HubConfig, experts: bool) -> dict[str, Any]:
    """Return the sizes of a layer's experts; empty for a dense MLP."""
    if not experts:
        return {}
    width = expert_width(config)
    return {
        "experts": config.size("num_experts"),
        "active_experts": config.size("num_experts_per_tok"),
        "expert_hidden": width,
        "shared_hidden": _shared_hidden(config, width),
    }


def _shared_hidden(config: HubConfig, width: int) -> int:
    """Return the hidden size of all shared experts together; 0 if there are none."""
    for key in (
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ):
        if config.value(key) is not None:
            return config.size(key, least=0)
    if config.family.shared:
        return width * config.size("num_shared_expert", 1, least=0)
    if config.value("n_shared_experts") is not None:
        return width * config.size("n_shared_experts", least=0)
    return 0


# ------------------------------------------------------------------ Nemotron-H


def hybrid_symbols(config: HubConfig) -> Sequence[str]:
    """Return the symbol of every layer of a HybridModel."""
    pattern, named = config.word("hybrid_override_pattern"), config.value("layers_block_type")
    if pattern:
        symbols = [*pattern]
        known: Sequence[str] = tuple(dict.fromkeys(_BLOCKS.values()))
        key = "hybrid_override_pattern"
    else:
        if not isinstance(named, list) or not named:
            raise config.refusal("hybrid_override_pattern", "is missing; expected a symbol a layer")
        symbols, known, key = named, tuple(_BLOCKS), "layers_block_type"
    for each in symbols:
        if each not in known:
            problem = f"{quoted(each)}: no kind of layer has that; known: {', '.join(known)}"
            raise config.refusal(key, problem)
    if len(symbols) > MOST_LAYERS:
        raise config.refusal(key, f"of {len(symbols)} layers: expected at most {MOST_LAYERS}")
    if config.size("num_hidden_layers", len(symbols), most=MOST_LAYERS) != len(symbols):
        stated = config.size("num_hidden_layers")
        raise config.refusal(key, f"of {len(symbols)} layers: expected {stated}")
    return [_BLOCKS.get(each, each) for each in symbols]


def _hybrid_shape(config: HubConfig, symbol: str) -> LayerShape:
    if symbol == ATTENTION:
        return LayerShape(mlp=False)
    if symbol == MLP:
        return LayerShape(attention=False)
    if symbol == MOE:
        latent = config.value("moe_latent_size")
        sizes = _feed_forward(config, True)
        width = 0 if latent is None else config.size("moe_latent_size")
        return LayerShape(attention=False, expert_latent=width, **sizes)
    names = ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim")
    return LayerShape(attention=False, mlp=False, **_mamba(config, *names))
