"""Attention over heads: K and V of a slice are kept for later slices."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes


@dataclass(frozen=True)
class AttentionSizes(Sizes):
    """attention: whether the layer has attention."""

    attention: bool = True


class AttentionPart(Part):
    """Q of all heads, K and V of ``kv_heads``."""

    MIXER, DEFAULT, WORD, ALONE = True, True, "heads", "attention"

    @classmethod
    def there(cls, shape: Any) -> bool:
        return shape.attention and not shape.kv_rank

    @property
    def query_hidden(self) -> int:
        return self.model.heads * self.model.head_size

    @property
    def key_hidden(self) -> int:
        return self.model.kv_heads * self.model.head_size

    @property
    def value_hidden(self) -> int:
        return self.key_hidden

    @property
    def output_hidden(self) -> int:
        """Channels of attention's output, before its projection."""
        return self.query_hidden

    @property
    def heads_hidden(self) -> int:
        """Q, K and V together."""
        return self.query_hidden + self.key_hidden + self.value_hidden

    @property
    def parameters(self) -> int:
        hidden = self.model.hidden
        return hidden * self.heads_hidden + self.output_hidden * hidden + hidden

    @property
    def flops_per_pair(self) -> float:
        return 2.0 * (self.query_hidden + self.output_hidden)  # QK', PV

    @property
    def saved(self) -> int:
        return 2 * self.model.hidden + self.heads_hidden + self.output_hidden

    @property
    def weight_inputs(self) -> int:
        return 2 * self.model.hidden + self.output_hidden + self.heads_hidden

    @property
    def carried(self) -> CarryOver:
        return CarryOver(self.key_hidden + self.value_hidden, heads=self.model.kv_heads)

    def stored(self, modules: tuple[str, ...]) -> int:
        return self.carried.channels

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        """Recomputing attention saves next to nothing with flash kernels: Q, K, V and the output
        stay as inputs of what is not recomputed."""
        norm = RecomputedModule(self.model.hidden, light=True)
        return {"core_attn": RecomputedModule(pairs=True), "layernorm": norm}

    @property
    def exchanged(self) -> int:
        return self.heads_hidden + self.output_hidden  # to heads, and the output back: eq. 3

    @property
    def gathers(self) -> bool:
        return True
