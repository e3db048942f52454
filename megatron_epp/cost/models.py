"""Shapes of the models that can be planned for, layer kind by layer kind."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_epp.cost.layer_kinds import parse_kinds
from megatron_epp.cost.named import pick
from megatron_epp.cost.profile import LAYER_KIND, kind_name

MOST = 10**9  # of any size: beyond it, products of sizes leave what numbers can say


def _require_sizes(value: Any, least: Mapping[str, int]) -> None:
    """A ValueError where a field of ``value`` that ``least`` names is no size."""
    for name, low in least.items():
        size = getattr(value, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < low:
            raise ValueError(f"{name} {size!r}: expected a whole number of at least {low}")
        if size > MOST:
            raise ValueError(f"{name} {size!r}: expected at most {MOST}")


def _require_flags(value: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(value, name), bool):
            raise ValueError(f"{name} {getattr(value, name)!r}: expected true or false")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Differences of a kind of layer from the model's plain one, which has attention over all that
    stands before a token and a dense MLP.

    attention, mlp    whether it has them
    window            keys that a query sees at most, itself among them; 0: all before it
    ffn_hidden        of its dense MLP; 0: the model's
    kv_rank           of latent attention: channels of the latent that K and V are made of; 0: K and
                      V are made of the hidden state
    query_rank        of the queries' latent; 0: they are made of the hidden state
    rotary_size       channels that latent attention adds to a head of Q, and alike to all of K
    value_size        channels of a head of V; 0: head_size
    carries_latents   whether later slices get a latent, of which they make K and V again; else K
                      and V as they are
    experts           in the place of the dense MLP; 0: none
    active_experts    of them that a token goes to
    expert_hidden     of each
    shared_hidden     of an expert that every token goes to besides; 0: none
    """

    attention: bool = True
    mlp: bool = True
    window: int = 0
    ffn_hidden: int = 0
    kv_rank: int = 0
    query_rank: int = 0
    rotary_size: int = 0
    value_size: int = 0
    carries_latents: bool = True
    experts: int = 0
    active_experts: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0

    def __post_init__(self):
        flags = ("attention", "mlp", "carries_latents")
        _require_flags(self, flags)
        _require_sizes(self, {f.name: 0 for f in fields(self) if f.name not in flags})
        if not (self.attention or self.mlp):
            raise ValueError("attention false, mlp false: expected a layer that has one of them")
        of_latents = ("query_rank", "rotary_size", "value_size")
        of_experts = ("active_experts", "expert_hidden", "shared_hidden")
        for names, whole in ((of_latents, "kv_rank"), (of_experts, "experts")):
            for name in names:
                if getattr(self, name) and not getattr(self, whole):
                    raise ValueError(f"{name} {getattr(self, name)}: expected {whole} beside it")
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ValueError(
                f"active_experts {self.active_experts}: expected 1 to {self.experts}, the experts"
            )
        if self.experts and not self.expert_hidden:
            raise ValueError("expert_hidden 0: expected the hidden size of an expert")
        if not self.attention and (self.window or self.kv_rank):
            raise ValueError("attention false: window and kv_rank have no effect; leave them out")
        if not self.mlp and (self.experts or self.ffn_hidden):
            raise ValueError("mlp false: experts and ffn_hidden have no effect; leave them out")

    @classmethod
    def of(cls, kind: str, value: Any) -> "LayerShape":
        """From a JSON object, as a model file has it for ``kind``."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"kinds: {kind}: expected an object of sizes")
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"kinds: {kind}: unknown field {name!r}; {hint}")
        try:
            return cls(**value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"kinds: {kind}: {error}") from error


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
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"model name {self.name!r}: expected a word")
        _require_flags(self, ("gated", "tied"))
        others = ("name", "gated", "tied", "kinds", "pattern")
        _require_sizes(self, {f.name: 1 for f in fields(self) if f.name not in others})
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
            raise ValueError(f"pattern {self.pattern!r}: expected a text")
        if not self.kinds:
            if self.pattern:
                raise ValueError(f"pattern {self.pattern!r}: expected kinds beside it")
            return
        if not self.pattern and len(self.kinds) > 1:
            raise ValueError("pattern is missing: expected which layer is of which kind")
        word = self.layer_kinds
        for kind in word:
            if kind not in self.kinds:
                raise ValueError(f"pattern: {kind!r} is none of kinds, {', '.join(self.kinds)}")
        if len(word) != self.layers:
            raise ValueError(
                f"pattern {self.pattern!r}: of {len(word)} layers; expected {self.layers}"
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of every layer, first to last; none where all are plain."""
        if self.pattern:
            return parse_kinds(self.pattern)
        return tuple(self.kinds) * self.layers

    @property
    def shapes(self) -> dict[str, "Layer"]:
        """One layer of every kind, by name, in the order of their first layers."""
        if not self.kinds:
            return {LAYER_KIND: Layer(self, LayerShape())}
        return {kind: Layer(self, self.kinds[kind]) for kind in dict.fromkeys(self.layer_kinds)}

    @property
    def most_experts(self) -> int:
        """Experts of the kind with most of them."""
        return max((shape.experts for shape in self.kinds.values()), default=0)

    @property
    def parameters(self) -> int:
        """Parameters of all layers, the embedding and, where it is not tied, the output layer; the
        last norm is left out."""
        shapes = self.shapes
        word = self.layer_kinds or (LAYER_KIND,) * self.layers
        each = {kind: layer.parameters + layer.expert_parameters for kind, layer in shapes.items()}
        ends = self.vocabulary_parameters * (1 if self.tied else 2)
        return sum(each[kind] for kind in word) + ends

    @property
    def query_hidden(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_hidden(self) -> int:
        """Channels of K, and of V: D_kv of InfiniPipe's eq. 3."""
        return self.kv_heads * self.head_size

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding. The output layer has as many (tied: a copy on the last
        stage)."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of a plain layer."""
        return Layer(self, LayerShape()).parameters

    @property
    def layer_flops_per_token(self) -> float:
        """Forward flops of a plain layer's linears."""
        return Layer(self, LayerShape()).flops_per_token

    @property
    def layer_flops_per_pair(self) -> float:
        """Forward flops of a plain layer's attention for one query and one key: QK', PV."""
        return Layer(self, LayerShape()).flops_per_pair


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of one layer of some kind; channels of a token, parameters, forward flops."""

    model: Model
    shape: LayerShape

    @property
    def latent(self) -> bool:
        return self.shape.kv_rank > 0

    @property
    def carries_latents(self) -> bool:
        return self.latent and self.shape.carries_latents

    @property
    def query_hidden(self) -> int:
        """Channels of Q; 0 without attention."""
        if not self.shape.attention:
            return 0
        return self.model.heads * (self.model.head_size + self.shape.rotary_size)

    @property
    def key_hidden(self) -> int:
        return self.query_hidden if self.latent else self._kv_hidden

    @property
    def value_hidden(self) -> int:
        if self.latent:
            return self.output_hidden
        return self._kv_hidden

    @property
    def _kv_hidden(self) -> int:
        return self.model.kv_hidden if self.shape.attention else 0

    @property
    def output_hidden(self) -> int:
        """Channels of attention's output, before its projection."""
        if not self.shape.attention:
            return 0
        return self.model.heads * (self.shape.value_size or self.model.head_size)

    @property
    def carried_hidden(self) -> int:
        """Channels that later slices get of a token: K and V, or the latent and its rotated
        part."""
        if self.carries_latents:
            return self.shape.kv_rank + self.shape.rotary_size
        return self.key_hidden + self.value_hidden

    @property
    def expansion_parameters(self) -> int:
        """That make K and V of a latent."""
        return self.shape.kv_rank * (self.model.heads * self.model.head_size + self.value_hidden)

    @property
    def up_parameters(self) -> int:
        """That make Q, K and V of latents, Q of the hidden state where it has none; 0 without."""
        if not self.latent:
            return 0
        made_of = self.shape.query_rank or self.model.hidden
        return made_of * self.query_hidden + self.expansion_parameters

    @property
    def attention_parameters(self) -> int:
        model, shape = self.model, self.shape
        if not shape.attention:
            return 0
        out = self.output_hidden * model.hidden
        if not self.latent:
            return model.hidden * (self.query_hidden + 2 * model.kv_hidden) + out
        query = model.hidden * self.query_hidden
        if shape.query_rank:
            query = shape.query_rank * (model.hidden + self.query_hidden + 1)
        down = model.hidden * (shape.kv_rank + shape.rotary_size) + shape.kv_rank
        return query + down + self.expansion_parameters + out

    @property
    def dense_hidden(self) -> int:
        """Hidden size of the MLP that every token goes through: a dense one, or the shared
        expert."""
        if not self.shape.mlp:
            return 0
        if self.shape.experts:
            return self.shape.shared_hidden
        return self.shape.ffn_hidden or self.model.ffn_hidden

    @property
    def matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.model.gated else 2

    @property
    def norms(self) -> int:
        return self.shape.attention + self.shape.mlp

    @property
    def parameters(self) -> int:
        """But for the experts, which are spread differently."""
        mlp = self.model.hidden * (self.dense_hidden * self.matrices + self.shape.experts)
        return self.attention_parameters + mlp + self.norms * self.model.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts but the shared one."""
        return self.shape.experts * self._one_expert

    @property
    def _one_expert(self) -> int:
        return self.model.hidden * self.shape.expert_hidden * self.matrices

    @property
    def active_mlp_parameters(self) -> int:
        """That a token meets in the MLP."""
        dense = self.model.hidden * (self.dense_hidden * self.matrices + self.shape.experts)
        return dense + self.shape.active_experts * self._one_expert

    @property
    def active_parameters(self) -> int:
        """That a token meets."""
        return self.parameters + self.shape.active_experts * self._one_expert

    @property
    def flops_per_token(self) -> float:
        """Flops of the linears."""
        return 2.0 * self.active_parameters

    @property
    def flops_per_pair(self) -> float:
        """Flops of attention for one query and one key: QK', PV."""
        return 2.0 * (self.query_hidden + self.output_hidden)

    @property
    def flops_per_context_token(self) -> float:
        """Flops of recomputing K and V from an earlier slice's latent."""
        return 2.0 * self.expansion_parameters if self.carries_latents else 0.0


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


def _gemma3_27b() -> Model:
    """Text alone: five layers that see 1,024 keys, then one that sees all."""
    kinds = {"window": LayerShape(window=1024), "full": LayerShape()}
    return Model("gemma3-27b", 62, 5376, 21504, 32, 16, 128, 262_144, gated=True, tied=True,
                 kinds=kinds, pattern="10*(5*window full) 2*window")  # fmt: skip


# Sources: the papers named above for gpt-*; for the others the makers' public configurations and
# reports. Llama 3 (Meta, 2024), Qwen3 (Alibaba, 2025), DeepSeek-V3 (2024; its multi-token
# prediction left out), gpt-oss (OpenAI's model card, 2025), Gemma 3 (Google, 2025). Biases, sinks,
# norms of Q and K and Gemma's two further norms are left out: below 0.1% of the parameters.
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
    )
}


def model(name: str) -> Model:
    """The model called ``name``, or the one that the JSON file at ``name`` describes."""
    return pick("model", name, MODELS, Model)
