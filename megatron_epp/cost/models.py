"""Shapes of the models that can be planned for."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from megatron_epp.cost.named import pick

MOST = 10**9  # of any size: beyond it, products of sizes leave what numbers can say


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder of equal layers.

    kv_heads   groups of K and V; equal to heads without grouped-query attention
    head_size  channels of a head
    gated      the MLP has a gate (SwiGLU): three matrices instead of two
    tied       the output layer shares the embedding's weights
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

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name":
                if not isinstance(value, str) or not value:
                    raise ValueError(f"model name {value!r}: expected a word")
            elif field.name in ("gated", "tied"):
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} {value!r}: expected true or false")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} {value!r}: expected a whole number of at least 1")
            elif value > MOST:
                raise ValueError(f"{field.name} {value!r}: expected at most {MOST}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads}: expected a divisor of heads, {self.heads}")

    @property
    def query_hidden(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_hidden(self) -> int:
        """Channels of K, and of V: D_kv of InfiniPipe's eq. 3."""
        return self.kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * (2 * self.query_hidden + 2 * self.kv_hidden)
        mlp = self.hidden * self.ffn_hidden * (3 if self.gated else 2)
        return attention + mlp + 2 * self.hidden

    @property
    def vocabulary_parameters(self) -> int:
        """Of the embedding, and of the output layer: a tied one has its copy on the last stage."""
        return self.vocabulary * self.hidden

    @property
    def layer_flops_per_token(self) -> float:
        """Forward flops of one layer's linears."""
        return 2.0 * self.layer_parameters

    @property
    def layer_flops_per_pair(self) -> float:
        """Forward flops of one layer's attention for one query and one key: QK', PV."""
        return 4.0 * self.query_hidden


def _gpt(name: str, layers: int, hidden: int) -> Model:
    # FlexSP's and InfiniPipe's: heads of 128, no gate. The vocabulary is the study's (logits of
    # 128,256), for InfiniPipe's remark that vocabularies are at least 128K.
    heads = hidden // 128
    return Model(name, layers, hidden, 4 * hidden, heads, heads, 128, 128_256)


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        _gpt("gpt-7b", 32, 4096),
        _gpt("gpt-13b", 40, 5120),
        _gpt("gpt-30b", 60, 6656),
        Model("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128_256, gated=True),
        Model("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128_256, gated=True),
    )
}


def model(name: str) -> Model:
    """The model called ``name``, or the one that the JSON file at ``name`` describes."""
    return pick("model", name, MODELS, Model)
