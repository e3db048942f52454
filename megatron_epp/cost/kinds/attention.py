"""Attention over heads; K and V of a slice are cached for later slices."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes


@dataclass(frozen=True)
class AttentionSizes(Sizes):
    """Sizes of an attention sublayer.

    Attributes:
        attention: whether the layer has attention.
        output_gate: whether attention's output has a gate, computed from the hidden state.
    """

    attention: bool = True
    output_gate: bool = False

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""
        super().require()
        if self.output_gate and not self.attention:
            raise ValueError("attention false: output_gate has no effect; leave it out")


class AttentionPart(Part):
    """Attention with Q of all heads, and K and V of ``kv_heads``."""

    MIXER, DEFAULT, WORD, ALONE = True, True, "heads", "attention"

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has attention with uncompressed K and V."""
        return shape.attention and not shape.kv_rank

    @property
    def query_hidden(self) -> int:
        """Channels of Q over all heads."""
        return self.model.heads * self.model.head_size

    @property
    def key_hidden(self) -> int:
        """Channels of K over all heads."""
        return self.model.kv_heads * self.model.head_size

    @property
    def value_hidden(self) -> int:
        """Channels of V over all heads."""
        return self.key_hidden

    @property
    def output_hidden(self) -> int:
        """Channels of attention's output before its projection."""
        return self.query_hidden

    @property
    def _gate(self) -> int:
        return self.output_hidden if self.shape.output_gate else 0  # projected with Q, K and V

    @property
    def heads_hidden(self) -> int:
        """Channels of Q, K and V together."""
        return self.query_hidden + self.key_hidden + self.value_hidden

    @property
    def parameters(self) -> int:
        """Parameters of the input and output projections and of the norm."""
        hidden = self.model.hidden
        return hidden * (self.heads_hidden + self._gate) + self.output_hidden * hidden + hidden

    @property
    def flops_per_pair(self) -> float:
        """Forward flops per query-key pair: QK' and PV."""
        return 2.0 * (self.query_hidden + self.output_hidden)

    @property
    def saved(self) -> int:
        """Channels saved from F to B; with a gate, also the gate and the ungated output."""
        return 2 * self.model.hidden + self.heads_hidden + self.output_hidden + 2 * self._gate

    @property
    def weight_inputs(self) -> int:
        """Channels saved from I to W."""
        return 2 * self.model.hidden + self.output_hidden + self.heads_hidden + self._gate

    @property
    def carried(self) -> CarryOver:
        """K and V of every token."""
        return CarryOver(self.key_hidden + self.value_hidden, heads=self.model.kv_heads)

    def stored(self, modules: tuple[str, ...]) -> int:
        """Return the channels of K and V, which are in the buffer of a slice's document."""
        return self.carried.channels

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        """Modules that can be recomputed; flash kernels of core attention save almost nothing."""
        norm = RecomputedModule(self.model.hidden, light=True)
        return {"core_attn": RecomputedModule(pairs=True), "layernorm": norm}

    @property
    def exchanged(self) -> int:
        """Channels of all-to-alls in a CP group: Q, K, V and output (eq. 3 of InfiniPipe)."""
        return self.heads_hidden + self.output_hidden

    @property
    def gathers(self) -> bool:
        """Whether the hidden state is gathered within a TP group."""
        return True
