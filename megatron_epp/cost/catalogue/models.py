"""Shapes of the models that can be planned for, layer kind by layer kind."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_epp.cost.catalogue.named import pick
from megatron_epp.cost.kinds.base import require_flags, require_sizes
from megatron_epp.cost.kinds.layer import Layer, LayerShape
from megatron_epp.cost.layer_kinds import format_kinds, parse_kinds
from megatron_epp.cost.profile import LAYER_KIND, kind_name
from megatron_epp.ir.errors import quoted, require_name


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder.

    kv_heads   groups of K and V; equal to heads without grouped-query attention
    head_size  channels of a head
    gated      the MLP has a gate (SwiGLU): three matrices instead of two
    tied       the output layer shares the embedding's weights
    kinds      of layers, by name; none: all layers are plain
    pattern    the kinds of the layers, first to last, as in ``3*dense 58*experts``; needed where
               there are several
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
                raise ValueError(f"pattern {quoted(self.pattern)}: expected kinds beside it")
            return
        if not self.pattern and len(self.kinds) > 1:
            raise ValueError("pattern is missing: expected which layer is of which kind")
        word = self.layer_kinds
        for kind in word:
            if kind not in self.kinds:
                raise ValueError(
                    f"pattern: {quoted(kind)} is none of kinds, {', '.join(self.kinds)}"
                )
        if len(word) != self.layers:
            raise ValueError(
                f"pattern {quoted(self.pattern)}: of {len(word)} layers; expected {self.layers}"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer, first to last; none where all are plain."""
        if self.pattern:
            return parse_kinds(self.pattern)
        return tuple(self.kinds) * self.layers

    @property
    def shapes(self) -> dict[str, Layer]:
        """One layer of every kind, by name, in the order of their first layers."""
        if not self.kinds:
            return {LAYER_KIND: Layer(self, LayerShape())}
        return {kind: Layer(self, self.kinds[kind]) for kind in dict.fromkeys(self.layer_kinds)}

    @property
    def mtp_layers_count(self) -> int:
        """Layers behind the others that predict further tokens, all on the last stage."""
        shapes = self.shapes
        predicts = [shapes[kind].heads > 0 for kind in self.layer_kinds]
        return len(predicts) - predicts.index(True) if True in predicts else 0

    @property
    def most_experts(self) -> int:
        """Experts of the kind with most of them."""
        return max(layer.experts for layer in self.shapes.values())

    @property
    def parameters(self) -> int:
        """Sum of all layers, the embedding and, where it is not tied, the output layer; the last
        norm is left out."""
        shapes = self.shapes
        word = self.layer_kinds or (LAYER_KIND,) * self.layers
        each = {kind: layer.parameters + layer.expert_parameters for kind, layer in shapes.items()}
        ends = self.vocabulary_parameters * (1 if self.tied else 2)
        return sum(each[kind] for kind in word) + ends

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding. The output layer has as many; a tied one is a copy on the
        last stage."""
        return self.vocabulary * self.hidden


def _gpt(name: str, layers: int, hidden: int) -> Model:
    # FlexSP's and InfiniPipe's: heads of 128, no gate. The vocabulary is the study's (logits of
    # 128,256), for InfiniPipe's remark that vocabularies are at least 128K.
    heads = hidden // 128
    return Model(name, layers, hidden, 4 * hidden, heads, heads, 128, 128_256)


def _qwen3_moe(name: str, layers: int, hidden: int, ffn: int, heads: int, expert: int) -> Model:
    shape = LayerShape(experts=128, active_experts=8, expert_hidden=expert)
    return Model(name, layers, hidden, ffn, heads, 4, 128, 151_936, gated=True,
                 kinds={"experts": shape})  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> Model:
    """Every second layer sees 128 keys, the first one does."""
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
    """The pattern of layers that each are of one letter's kind, as a HybridModel's is written;
    ``a`` stands for ``*``, ``m`` for ``-``."""
    return format_kinds([kinds[symbol] for symbol in symbols.replace("*", "a").replace("-", "m")])


def _mamba(heads: int) -> LayerShape:
    """Mamba alone, as in all of Nemotron's."""
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
    return Model("qwen3-next-80b", 48, 2048, 5120, 16, 2, 256, 151_936, gated=True,
                 kinds={"delta": delta, "attention": mixture},
                 pattern="12*(3*delta attention)")  # fmt: skip


def _gemma3_27b() -> Model:
    """Text alone: five layers that see 1,024 keys, then one that sees all."""
    kinds = {"window": LayerShape(window=1024), "full": LayerShape()}
    return Model("gemma3-27b", 62, 5376, 21504, 32, 16, 128, 262_144, gated=True, tied=True,
                 kinds=kinds, pattern="10*(5*window full) 2*window")  # fmt: skip


# Sources: the papers named above for gpt-*; for the others the makers' public configurations and
# reports. Llama 3 (Meta, 2024), Qwen3 (Alibaba, 2025), DeepSeek-V3 (2024), gpt-oss (OpenAI's model
# card, 2025), Gemma 3 (Google, 2025), Nemotron-H and Nemotron 3 (NVIDIA, 2025), Qwen3-Next
# (Alibaba, 2025). Left out: heads for further tokens; and, up to 0.1% of the parameters, biases,
# sinks, norms of Q and K, Qwen3-Next's gates of attention and Gemma's two further norms.
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


def model(name: str) -> Model:
    """The model called ``name``, or the one that the JSON file at ``name`` describes."""
    return pick("model", name, MODELS, Model)
