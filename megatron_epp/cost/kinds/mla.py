"""Multi-latent attention (MLA): K and V are projected from a latent, and cached."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_epp.cost.kinds.attention import AttentionPart, AttentionSizes, attention
from megatron_epp.cost.kinds.base import CarryOver, Decoder, RecomputedModule, Sublayer


@dataclass(frozen=True)
class MLASizes(AttentionSizes):
    """Sizes of multi-latent attention.

    Attributes:
        kv_rank: channels of the latent of K and V; 0: K and V are projected from the hidden state.
        query_rank: channels of the queries' latent; 0: queries are projected from the hidden state.
        rotary_size: rotary channels that MLA adds to each head of Q, and once to K for all heads.
        value_size: channels of a head of V; 0: head_size.
    """

    kv_rank: int = 0
    query_rank: int = 0
    rotary_size: int = 0
    value_size: int = 0

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""
        super().require()
        for name in ("query_rank", "rotary_size", "value_size"):
            if getattr(self, name) and not self.kv_rank:
                raise ValueError(f"{name} {getattr(self, name)}: expected kv_rank with it")
        if self.output_gate and self.kv_rank:
            raise ValueError("output_gate true: expected false with kv_rank")
        if not self.attention and self.kv_rank:
            raise ValueError("attention false: kv_rank has no effect; leave it out")


class MLAPart(AttentionPart):
    """Attention whose K and V are projected from a latent."""

    DEFAULT, WORD, ALONE, MODES = False, "latent", "latent", "u"

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has MLA, but not a kind of MLA with its own class."""
        derived = any(kind.there(shape) for kind in cls.__subclasses__())
        return shape.attention and shape.kv_rank > 0 and not derived

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of MLA, whose caches hold K and V of all heads."""
        hidden, ranks = model.hidden, shape.query_rank + shape.kv_rank
        query = model.heads * (model.head_size + shape.rotary_size)
        value = model.heads * (shape.value_size or model.head_size)
        expanded = model.heads * model.head_size + value  # K's rotary part apart
        expansion = shape.kv_rank * expanded  # parameters
        of_queries = hidden * query
        if shape.query_rank:
            of_queries = shape.query_rank * (hidden + query + 1)
        down = hidden * (shape.kv_rank + shape.rotary_size) + shape.kv_rank
        up = (shape.query_rank or hidden) * query + expansion
        heads = attention(model, query, query, value, value)
        return replace(
            heads,
            parameters=of_queries + down + expansion + value * hidden + hidden,
            saved=heads.saved + 2 * ranks + shape.rotary_size,  # before and after their norms
            weight_inputs=2 * hidden + value + 2 * ranks + query + shape.rotary_size + expanded,
            recomputed={**heads.recomputed, "mla_up_proj": RecomputedModule(2 * query + value, up)},
            carried=CarryOver(query + value, heads=model.heads),
            stored_unless="mla_up_proj",
        )
