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
from megatron_epp.cost.layer_kinds import format_kinds, parse_kinds
from megatron_epp.cost.profile import LAYER_KIND, kind_name
from megatron_epp.ir.errors import quoted, require_name


@dataclass(frozen=True, slots=True)
class Model:
    """Decoder-only model.

    Attributes:
        name: name on the command line.
        layers: number of layers, MTP layers included.
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
        """Number of MTP layers, which follow all other layers and are on the last stage."""
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

        Backward counts as twice the flops of forward. Attention counts only pairs of a query and a
        key that it attends to. Divided by seconds and the devices' peak flops, this is the MFU.
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


def _gpt(name: str, layers: int, hidden: int) -> Model:
    # FlexSP's and InfiniPipe's models: heads of 128, no gate. The vocabulary of 128,256 follows
    # InfiniPipe's remark that vocabularies have at least 128K entries.
    heads = hidden // 128
    return Model(name, layers, hidden, 4 * hidden, heads, heads, 128, 128_256)


def _qwen3_moe(name: str, layers: int, hidden: int, ffn: int, heads: int, expert: int) -> Model:
    shape = LayerShape(experts=128, active_experts=8, expert_hidden=expert)
    return Model(name, layers, hidden, ffn, heads, 4, 128, 151_936, gated=True,
                 kinds={"experts": shape})  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> Model:
    """Return a model in which every second layer, from the first on, has a window of 128 keys."""
    mixture = LayerShape(experts=experts, active_experts=4, expert_hidden=2880)
    kinds = {"window": dataclasses.replace(mixture, window=128), "full": mixture}
    return Model(name, layers, 2880, 2880, 64, 8, 64, 201_088, gated=True, kinds=kinds,
                 pattern=f"{layers // 2}*(window full)")  # fmt: skip


def _deepseek_v3() -> Model:
    latent = LayerShape(kv_rank=512, query_rank=1536, rotary_size=64, value_size=128)
    mixture = dataclasses.replace(
        latent, experts=256, active_experts=8, expert_hidden=2048, shared_hidden=2048
    )
    return Model("deepseek-v3", 61, 7168, 18432, 128, 128, 128, 129_280, gated=True,
                 kinds={"dense": latent, "experts": mixture},
                 pattern="3*dense 58*experts")  # fmt: skip


def _of_symbols(symbols: str, **kinds: str) -> str:
    """Return the pattern of layers whose kinds are given by symbols, as in a HybridModel.

    ``kinds`` contains the kind of each symbol. There, ``a`` stands for ``*`` and ``m`` for ``-``.
    """
    return format_kinds([kinds[symbol] for symbol in symbols.replace("*", "a").replace("-", "m")])


def _mamba(heads: int) -> LayerShape:
    """Return the shape of a Mamba layer of the Nemotron models."""
    return LayerShape(
        attention=False,
        mlp=False,
        mamba_heads=heads,
        state_groups=8,
        state_keys=128,
        state_values=64,
    )


def _nemotron_h_8b() -> Model:
    kinds = {
        "mamba": _mamba(128),
        "mlp": LayerShape(attention=False),
        "attention": LayerShape(mlp=False),
    }
    symbols = "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"
    return Model("nemotron-h-8b", 52, 4096, 21504, 32, 8, 128, 131_072, kinds=kinds,
                 pattern=_of_symbols(symbols, M="mamba", m="mlp", a="attention"))  # fmt: skip


def _nemotron_3(
    name: str, hidden: int, symbols: str, mamba_heads: int, ffn: int, experts: LayerShape
) -> Model:
    kinds = {
        "mamba": _mamba(mamba_heads),
        "experts": experts,
        "attention": LayerShape(mlp=False),
    }
    return Model(name, len(symbols), hidden, ffn, 32, 2, 128, 131_072, kinds=kinds,
                 pattern=_of_symbols(symbols, M="mamba", E="experts", a="attention"))  # fmt: skip


def _nemotron_3_nano() -> Model:
    symbols = 5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME"
    experts = LayerShape(
        attention=False, experts=128, active_experts=6, expert_hidden=1856, shared_hidden=3712
    )
    return _nemotron_3("nemotron-3-nano", 2688, symbols, 64, 1856, experts)


def _nemotron_3_super() -> Model:
    symbols = "MEMEMEM*E" + 2 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME"
    experts = LayerShape(
        attention=False,
        experts=512,
        active_experts=22,
        expert_hidden=2688,
        expert_latent=1024,
        shared_hidden=5376,
    )
    return _nemotron_3("nemotron-3-super", 4096, symbols, 128, 2688, experts)


def _qwen3_next_80b() -> Model:
    mixture = LayerShape(experts=512, active_experts=10, expert_hidden=512, shared_hidden=512)
    delta = dataclasses.replace(
        mixture,
        attention=False,
        delta_heads=32,
        state_groups=16,
        state_keys=128,
        state_values=128,
    )
    gated = dataclasses.replace(mixture, output_gate=True)
    return Model("qwen3-next-80b", 48, 2048, 5120, 16, 2, 256, 151_936, gated=True,
                 kinds={"delta": delta, "attention": gated},
                 pattern="12*(3*delta attention)")  # fmt: skip


def _gemma3_27b() -> Model:
    """Return the text model: five layers with a window of 1,024 keys, then one without a window."""
    kinds = {"window": LayerShape(window=1024), "full": LayerShape()}
    return Model("gemma3-27b", 62, 5376, 21504, 32, 16, 128, 262_144, gated=True, tied=True,
                 kinds=kinds, pattern="10*(5*window full) 2*window")  # fmt: skip


# Sources: for gpt-* the papers named above; for the others the makers' public configurations and
# reports: Llama 3 (Meta, 2024), Qwen3 and Qwen3-Next (Alibaba, 2025), DeepSeek-V3 (2024), gpt-oss
# (OpenAI's model card, 2025), Gemma 3 (Google, 2025), Nemotron-H and Nemotron 3 (NVIDIA, 2025).
# MTP layers are left out. So are biases, sinks, norms of Q and K, and Gemma's two additional norms,
# which are up to 0.1% of the parameters.
MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        _gpt("gpt-7b", 32, 4096),
        _gpt("gpt-13b", 40, 5120),
        _gpt("gpt-30b", 60, 6656),
        Model("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128_256, gated=True),
        Model("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128_256, gated=True),
        Model("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151_936, gated=True),
        Model("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151_936, gated=True),
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 6144, 32, 768),
        _qwen3_moe("qwen3-235b-a22b", 94, 4096, 12288, 64, 1536),
        _deepseek_v3(),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
        _gemma3_27b(),
        _nemotron_h_8b(),
        _nemotron_3_nano(),
        _nemotron_3_super(),
        _qwen3_next_80b(),
    )
}

# Properties that shapes do not have, as keys of a config.json, from the same sources.
_QWEN3: dict[str, Any] = {"rope_theta": 1_000_000, "rms_norm_eps": 1e-6}
_LLAMA3 = {"model_type": "llama", "rope_theta": 500_000, "rms_norm_eps": 1e-5}
_NEMOTRON: dict[str, Any] = {"model_type": "nemotron_h", "layer_norm_epsilon": 1e-5}
_NEMOTRON_3 = {**_NEMOTRON, "routed_scaling_factor": 2.5, "num_experts": 128}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
_DEEPSEEK_YARN = {**_YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
_GPT_OSS_YARN = {**_YARN, "factor": 32.0, "truncate": False}
_GPT_OSS = {"model_type": "gpt_oss", "rope_theta": 150_000, "rope_scaling": _GPT_OSS_YARN}
STYLES: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": _LLAMA3,
    "llama3-70b": _LLAMA3,
    "qwen3-8b": {"model_type": "qwen3", **_QWEN3},
    "qwen3-32b": {"model_type": "qwen3", **_QWEN3},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", **_QWEN3, "norm_topk_prob": True},
    "qwen3-235b-a22b": {"model_type": "qwen3_moe", **_QWEN3, "norm_topk_prob": True},
    "deepseek-v3": {"model_type": "deepseek_v3", "rope_scaling": _DEEPSEEK_YARN},
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS,
    "gemma3-27b": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "nemotron-h-8b": _NEMOTRON,
    "nemotron-3-nano": _NEMOTRON_3,
    "nemotron-3-super": {**_NEMOTRON_3, "routed_scaling_factor": 5.0},
    "qwen3-next-80b": {"model_type": "qwen3_next", "rope_theta": 10_000_000},
}


def model(name: str, like: str | None = None) -> Model:
    """Return the model that ``name`` means.

    Args:
        name: name in the catalogue, JSON file with the model's shape, or a config.json of
            transformers: the file, its folder, or a cached ``org/name``.
        like: model type used to interpret a config.json, instead of the file's model_type.

    Raises:
        ValueError: there is no such model, or its description is invalid.
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


def hub_model(config: HubConfig) -> Model:
    """Return the model that ``config`` describes."""
    fields_of_model = model_fields(config)
    try:
        return Model(**fields_of_model)
    except ValueError as error:
        raise ValueError(f"{config.where}: {error}") from error


def model_config(name: str, like: str | None = None) -> HubConfig | None:
    """Return the model's config.json, which has properties beyond its shape.

    Return None if the model has no config.json, such as a model in this project's own JSON form.
    """
    if name in MODELS:
        return catalogue_config(name, STYLES[name]) if name in STYLES else None
    path = find_config(name)
    if path is None:
        return None
    value = read_description(name, path)
    if not is_hub_config(value) and not (like is not None and isinstance(value, Mapping)):
        return None
    config = hub_config(name, value, like)
    model_fields(config)  # it adds assumptions to ``config``
    return config
