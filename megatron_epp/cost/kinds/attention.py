"""Attention over heads; K and V of a slice are cached for later slices."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import CarryOver, Decoder, Part, RecomputedModule, Sizes, Sublayer


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

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of attention; a gate has as many channels as Q."""
        query, key = model.heads * model.head_size, model.kv_heads * model.head_size
        return attention(model, query, key, key, query, query if shape.output_gate else 0)


def attention(
    model: Decoder, query: int, key: int, value: int, output: int, gate: int = 0
) -> Sublayer:
    """Return the quantities of attention; channels are summed over all heads.

    Args:
        model: the model.
        query: channels of Q.
        key: channels of K.
        value: channels of V.
        output: channels of the output before its projection.
        gate: channels of a gate, projected with Q, K and V.
    """
    hidden, heads = model.hidden, query + key + value
    return Sublayer(
        parameters=hidden * (heads + gate) + output * hidden + hidden,
        saved=2 * hidden + heads + output + 2 * gate,  # the gate and the ungated output
        weight_inputs=2 * hidden + output + heads + gate,
        recomputed={
            "core_attn": RecomputedModule(pairs=True),  # flash kernels save almost nothing
            "layernorm": RecomputedModule(hidden, light=True),
        },
        carried=CarryOver(key + value, heads=model.kv_heads),
        stored=key + value,
        flops_per_pair=2.0 * (query + output),  # QK' and PV
        exchanged=heads + output,  # eq. 3 of InfiniPipe
        gathers=1,
    )
