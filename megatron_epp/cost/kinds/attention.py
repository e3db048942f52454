"""Attention over heads: K and V of a slice are kept for later slices."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes


@dataclass(frozen=True)
class AttentionSizes(Sizes):
    """attention: whether the layer has attention; output_gate: whether its output has a gate, which
    the hidden state makes."""

    attention: bool = True
    output_gate: bool = False

    def require(self) -> None:
        super().require()
        if self.output_gate and not self.attention:
            raise ValueError("attention false: output_gate has no effect; leave it out")


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
    def _gate(self) -> int:
        """Channels of the output's gate, which the projection makes with Q, K and V."""
        return self.output_hidden if self.shape.output_gate else 0

    @property
    def heads_hidden(self) -> int:
        """Q, K and V together."""
        return self.query_hidden + self.key_hidden + self.value_hidden

    @property
    def parameters(self) -> int:
        hidden = self.model.hidden
        return hidden * (self.heads_hidden + self._gate) + self.output_hidden * hidden + hidden

    @property
    def flops_per_pair(self) -> float:
        return 2.0 * (self.query_hidden + self.output_hidden)  # QK', PV

    @property
    def saved(self) -> int:
        # A gate is saved, and what it is multiplied with beside the product.
        return 2 * self.model.hidden + self.heads_hidden + self.output_hidden + 2 * self._gate

    @property
    def weight_inputs(self) -> int:
        return 2 * self.model.hidden + self.output_hidden + self.heads_hidden + self._gate

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
