"""Models of the catalogue, layer kind by layer kind."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_epp.cost.catalogue.hub_file import (
    HubConfig,
    catalogue_config,
    find_config,
    hub_config,
    is_hub_config,
    read_description,
)
from megatron_epp.cost.catalogue.hub_shape import model_fields
from megatron_epp.cost.catalogue.named import from_json, pick
from megatron_epp.cost.columns import WindowPairs
from megatron_epp.cost.kinds.base import require_flags, require_sizes
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.cost.layer_kinds import parse_kinds
from megatron_epp.cost.profile import LAYER_KIND, kind_name
from megatron_epp.ir.errors import quoted, require_name


@dataclass(frozen=True, slots=True)
class Model:
    """Decoder-only model.

    Attributes:
        name: name on the command line.
        layers: number of layers, including those of MTP.
        hidden: hidden size.
        ffn_hidden: hidden size of a dense MLP.
        heads: number of attention heads.
        kv_heads: number of query groups; equal to heads without grouped-query attention.
        head_size: channels of a head.
        vocabulary: number of vocabulary entries.
        gated: whether the MLP has a gate (SwiGLU), which makes three matrices instead of two.
        tied: whether the LM head shares the embedding's weights.
        kinds: shapes of the layer kinds by name; empty: all layers have the default shape.
        pattern: kinds of the layers in order, as in ``3*dense 58*experts``; needed if there are
            several kinds.

    Raises:
        ValueError: a field is invalid, or fields contradict each other.
    """

    name: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    gated: bool = False
    tied: bool = False
    kinds: Mapping[str, LayerShape] = dataclasses.field(default_factory=dict)
    pattern: str = ""

    def __post_init__(self):
        require_name("model name", self.name)
        require_flags(self, ("gated", "tied"))
        others = ("name", "gated", "tied", "kinds", "pattern")
        require_sizes(self, {f.name: 1 for f in fields(self) if f.name not in others})
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads}: expected a divisor of heads, {self.heads}")
        if not isinstance(self.kinds, Mapping):
            raise ValueError("kinds: expected an object from a kind's name to its sizes")
        shapes = {}
        for kind, value in self.kinds.items():
            try:
                kind_name(kind)
            except ValueError as error:
                raise ValueError(f"kinds: {error}") from error
            shapes[kind] = LayerShape.of(kind, value)
        object.__setattr__(self, "kinds", shapes)
        self._require_pattern()

    def _require_pattern(self) -> None:
        if not isinstance(self.pattern, str):
            raise ValueError(f"pattern {quoted(self.pattern)}: expected a text")
        if not self.kinds:
            if self.pattern:
                raise ValueError(f"pattern {quoted(self.pattern)}: expected kinds with it")
            return
        if not self.pattern and len(self.kinds) > 1:
            raise ValueError("pattern is missing: expected which layer is of which kind")
        word = self.layer_kinds
        for kind in word:
            if kind not in self.kinds:
                raise ValueError(
                    f"pattern: {quoted(kind)} is not one of the kinds, {', '.join(self.kinds)}"
                )
        if len(word) != self.layers:
            raise ValueError(
                f"pattern {quoted(self.pattern)}: of {len(word)} layers; expected {self.layers}"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of every layer in order; empty if all layers have the default shape."""
        if self.pattern:
            return parse_kinds(self.pattern)
        return tuple(self.kinds) * self.layers

    @property
    def shapes(self) -> dict[str, Layer]:
        """One layer of every kind by name; kinds are in the order in which they first occur."""
        if not self.kinds:
            return {LAYER_KIND: Layer.of(self, LayerShape())}
        return {kind: Layer.of(self, self.kinds[kind]) for kind in dict.fromkeys(self.layer_kinds)}

    @property
    def mtp_layers_count(self) -> int:
        """Number of layers from the first MTP layer on; they are on the last stage."""
        shapes = self.shapes
        predicts = [shapes[kind].heads > 0 for kind in self.layer_kinds]
        return len(predicts) - predicts.index(True) if True in predicts else 0

    @property
    def most_experts(self) -> int:
        """Largest number of experts of any layer kind."""
        return max(layer.experts for layer in self.shapes.values())

    @property
    def parameters(self) -> int:
        """Parameters of all layers, the embedding and, if not tied, the LM head.

        The last norm is left out.
        """
        shapes = self.shapes
        word = self.layer_kinds or (LAYER_KIND,) * self.layers
        each = {kind: layer.parameters + layer.expert_parameters for kind, layer in shapes.items()}
        ends = self.vocabulary_parameters * (1 if self.tied else 2)
        return sum(each[kind] for kind in word) + ends

    @property
    def active_parameters(self) -> int:
        """Parameters that process a token; only experts to which the token is routed count."""
        shapes, word = self.shapes, self.layer_kinds or (LAYER_KIND,) * self.layers
        unused = {
            kind: each.routed.parameters - each.routed.active for kind, each in shapes.items()
        }
        return self.parameters - sum(unused[kind] for kind in word)

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Return the flops of training on documents of these ``lengths``, without recompute.

        Backward counts as twice the flops of forward. Pairs of a query and a
        key count only if the query attends to the key. The MFU is the result divided by the seconds
        and by the peak flops per second of all devices.
        """
        stops = np.array(lengths, np.int64)
        starts, tokens = np.zeros_like(stops), float(stops.sum())
        kinds = Counter(self.layer_kinds or (LAYER_KIND,) * self.layers)
        forward = 2.0 * self.vocabulary_parameters * tokens
        for kind, count in kinds.items():
            layer = self.shapes[kind]
            flops = layer.flops_per_token * tokens
            seen = WindowPairs(layer.window or int(stops.max()))
            others = ((column, work.flops) for column, work in layer.work.items())
            for column, each in ((seen, layer.flops_per_pair), *others):
                flops += each * float(column.of_spans(starts, stops).sum())
            forward += count * flops
        return 3 * forward

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding; profiles count as many for an LM head, tied or not."""
        return self.vocabulary * self.hidden


def hub_model(config: HubConfig) -> Model:
    """Return the model that ``config`` describes."""
    fields_of_model = model_fields(config)
    try:
        return Model(**fields_of_model)
    except ValueError as error:
        raise ValueError(f"{config.where}: {error}") from error


def _gpt(name: str, layers: int, hidden: int) -> Model:
    # FlexSP's and InfiniPipe's models: heads of 128, no gate. The vocabulary of 128,256 follows
    # InfiniPipe's remark that vocabularies have at least 128K entries.
    heads = hidden // 128
    return Model(name, layers, hidden, 4 * hidden, heads, heads, 128, 128_256)


def _keys(
    model_type: str,
    layers: int,
    hidden: int,
    ffn_hidden: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    **others: Any,
) -> dict[str, Any]:
    """Return the keys of a config.json; the model type has defaults (hub_families.py)."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn_hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **others,
    }


_LLAMA3 = {"rope_theta": 500_000, "rms_norm_eps": 1e-5}
_QWEN3 = {"rope_theta": 1_000_000, "rms_norm_eps": 1e-6}
_QWEN3_MOE = {**_QWEN3, "norm_topk_prob": True, "head_dim": 128}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
_DEEPSEEK_YARN = {**_YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
_GPT_OSS = {
    "rope_theta": 150_000,
    "rope_scaling": {**_YARN, "factor": 32.0, "truncate": False},
}
# Sources: the makers' public configurations and reports: Llama 3 (Meta, 2024), Qwen3 and Qwen3-Next
# (Alibaba, 2025), DeepSeek-V3 (2024), gpt-oss (OpenAI's model card, 2025), Gemma 3 (Google, 2025),
# Nemotron-H and Nemotron 3 (NVIDIA, 2025). MTP layers are left out. So are biases, sinks, norms of
# Q and K, and Gemma's two additional norms, which are up to 0.1% of the parameters.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": _keys("llama", 32, 4096, 14336, 32, 8, 128_256, **_LLAMA3),
    "llama3-70b": _keys("llama", 80, 8192, 28672, 64, 8, 128_256, **_LLAMA3),
    "qwen3-8b": _keys("qwen3", 36, 4096, 12288, 32, 8, 151_936, **_QWEN3),
    "qwen3-32b": _keys("qwen3", 64, 5120, 25600, 64, 8, 151_936, **_QWEN3),
    "qwen3-30b-a3b": _keys("qwen3_moe", 48, 2048, 6144, 32, 4, 151_936, **_QWEN3_MOE),
    "qwen3-235b-a22b": _keys(
        "qwen3_moe", 94, 4096, 12288, 64, 4, 151_936, moe_intermediate_size=1536, **_QWEN3_MOE
    ),
    "deepseek-v3": _keys(
        *("deepseek_v3", 61, 7168, 18432, 128, 128, 129_280), rope_scaling=_DEEPSEEK_YARN
    ),
    "gpt-oss-20b": _keys(
        "gpt_oss", 24, 2880, 2880, 64, 8, 201_088, **_GPT_OSS, num_local_experts=32
    ),
    "gpt-oss-120b": _keys("gpt_oss", 36, 2880, 2880, 64, 8, 201_088, **_GPT_OSS),
    "gemma3-27b": _keys(
        *("gemma3_text", 62, 5376, 21504, 32, 16, 262_144),
        head_dim=128,
        sliding_window=1024,
        query_pre_attn_scalar=168,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "nemotron-h-8b": _keys(
        *("nemotron_h", 52, 4096, 21504, 32, 8, 131_072),
        hybrid_override_pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
    ),
    "nemotron-3-nano": _keys(
        *("nemotron_h", 52, 2688, 1856, 32, 2, 131_072),
        hybrid_override_pattern=5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
        mamba_num_heads=64,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "nemotron-3-super": _keys(
        *("nemotron_h", 88, 4096, 2688, 32, 2, 131_072),
        hybrid_override_pattern=3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
        n_routed_experts=512,
        num_experts_per_tok=22,
        moe_intermediate_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        routed_scaling_factor=5.0,
    ),
    "qwen3-next-80b": _keys("qwen3_next", 48, 2048, 5120, 16, 2, 151_936, rope_theta=10_000_000),
}
MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        *(_gpt("gpt-7b", 32, 4096), _gpt("gpt-13b", 40, 5120), _gpt("gpt-30b", 60, 6656)),
        *(hub_model(catalogue_config(name, keys)) for name, keys in CONFIGS.items()),
    )
}


def model(name: str, like: str | None = None) -> Model:
    """Return the model that ``name`` means.

    Args:
        name: name in the catalogue, JSON file with the model's shape, or a config.json of
            transformers: the file, its folder, or a cached ``org/name``.
        like: model type used to interpret a config.json, instead of the file's model_type.

    Raises:
        ValueError: there is no such model, its description is invalid, or ``like`` is given for a
            model that is not a config.json.
    """
    if name in MODELS:
        require_no_like(name, like)
        return MODELS[name]
    path = find_config(name)
    if path is None:
        if name.count("/") == 1 and not name.endswith(".json"):
            raise ValueError(
                f"model {quoted(name)}: no such file or folder, and not in Hugging Face's cache; "
                f"`hf download {name} config.json` fetches it"
            )
        return pick("model", name, MODELS, Model)
    value = read_description(name, path)
    if is_hub_config(value) or (like is not None and isinstance(value, Mapping)):
        return hub_model(hub_config(name, value, like))
    require_no_like(name, like)
    return from_json(f"model file {name}", value, Model)


def require_no_like(name: str, like: str | None) -> None:
    """Raise a ValueError if ``like`` is given for a model that is not a config.json."""
    if like is not None:
        raise ValueError(
            f"--like {like}: {name} is not a config.json of transformers; leave it out"
        )


def model_config(name: str, like: str | None = None) -> HubConfig | None:
    """Return the model's config.json, which has properties beyond its shape.

    Return None if the model is unknown or has no config.json, as in this project's own JSON form.

    Raises:
        ValueError: the file cannot be read or is invalid.
    """
    if name in MODELS:
        return catalogue_config(name, CONFIGS[name]) if name in CONFIGS else None
    path = find_config(name)
    if path is None:
        return None
    value = read_description(name, path)
    if not is_hub_config(value) and not (like is not None and isinstance(value, Mapping)):
        return None
    config = hub_config(name, value, like)
    model_fields(config)  # it adds assumptions to ``config``
    return config
