"""Multi-latent attention (MLA): K and V are projected from a latent, which may be cached."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.columns import CONTEXT, Column
from megatron_epp.cost.kinds.attention import AttentionPart, AttentionSizes
from megatron_epp.cost.kinds.base import (
    ELEMENT_BYTES,
    CarryOver,
    ContextWorkspace,
    RecomputedModule,
    Work,
)
from megatron_epp.ir import Kind

CONTEXT_BLOCK = 2048  # tokens of a context whose K and V are projected at a time


@dataclass(frozen=True)
class MLASizes(AttentionSizes):
    """Sizes of multi-latent attention.

    Attributes:
        kv_rank: channels of the latent of K and V; 0: K and V are projected from the hidden state.
        query_rank: channels of the queries' latent; 0: queries are projected from the hidden state.
        rotary_size: rotary channels that MLA adds to each head of Q, and once to K for all heads.
        value_size: channels of a head of V; 0: head_size.
        carries_latents: whether later slices receive the latent and project K and V again;
            otherwise they receive K and V.
    """

    kv_rank: int = 0
    query_rank: int = 0
    rotary_size: int = 0
    value_size: int = 0
    carries_latents: bool = True

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

    @property
    def query_hidden(self) -> int:
        """Channels of Q over all heads."""
        return self.model.heads * (self.model.head_size + self.shape.rotary_size)

    @property
    def key_hidden(self) -> int:
        """Channels of K over all heads."""
        return self.query_hidden

    @property
    def value_hidden(self) -> int:
        """Channels of V over all heads."""
        return self.model.heads * (self.shape.value_size or self.model.head_size)

    @property
    def output_hidden(self) -> int:
        """Channels of attention's output before its projection."""
        return self.value_hidden

    @property
    def _expanded(self) -> int:
        return self.model.heads * self.model.head_size + self.value_hidden  # K's rotary part apart

    @property
    def _expansion_parameters(self) -> int:
        return self.shape.kv_rank * self._expanded

    @property
    def _ranks(self) -> int:
        return self.shape.query_rank + self.shape.kv_rank

    @property
    def parameters(self) -> int:
        """Parameters of all projections and norms."""
        hidden, shape = self.model.hidden, self.shape
        query = hidden * self.query_hidden
        if shape.query_rank:
            query = shape.query_rank * (hidden + self.query_hidden + 1)
        down = hidden * (shape.kv_rank + shape.rotary_size) + shape.kv_rank
        out = self.output_hidden * hidden
        return query + down + self._expansion_parameters + out + hidden

    @property
    def work(self) -> Mapping[Column, Work]:
        """Work per context token to project K and V from latents of the context, in F and in B."""
        if not self.shape.carries_latents:
            return {}
        return {CONTEXT: Work(2.0 * self._expansion_parameters, backward=3.0)}

    @property
    def workspaces(self) -> Mapping[Kind, ContextWorkspace]:
        """Bytes of K and V of a block of the context; B adds gradients of K, V and latents."""
        if not self.shape.carries_latents:
            return {}
        block = CONTEXT_BLOCK * float(ELEMENT_BYTES * self.carried.expanded)
        gradients = float(ELEMENT_BYTES * self.carried.channels)
        return {Kind.FORWARD: ContextWorkspace(per_op=block),
                Kind.BACKWARD: ContextWorkspace(gradients, 2 * block)}  # fmt: skip

    @property
    def saved(self) -> int:
        """Channels saved from F to B, latents before and after their norms included."""
        return super().saved + 2 * self._ranks + self.shape.rotary_size

    @property
    def weight_inputs(self) -> int:
        """Channels saved from I to W."""
        gradients = self.query_hidden + self._ranks + self.shape.rotary_size + self._expanded
        return 2 * self.model.hidden + self.output_hidden + self._ranks + gradients

    @property
    def carried(self) -> CarryOver:
        """The latent of every token, or its K and V."""
        heads = self.key_hidden + self.value_hidden
        if not self.shape.carries_latents:
            return CarryOver(heads, heads=self.model.heads)
        return CarryOver(self.shape.kv_rank + self.shape.rotary_size, heads)

    def stored(self, modules: tuple[str, ...]) -> int:
        """Return the channels of K and V in the document's buffer; 0 if it contains latents."""
        if self.shape.carries_latents or "mla_up_proj" in modules:
            return 0
        return self.carried.channels

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        """Modules that selective recomputation supports."""
        of_queries = self.shape.query_rank or self.model.hidden
        projections = of_queries * self.query_hidden + self._expansion_parameters
        up = RecomputedModule(self.heads_hidden, projections)
        return {**super().recomputed, "mla_up_proj": up}

    @property
    def exchanged(self) -> int:
        """Channels exchanged within a CP group, the latent included."""
        latent = self.carried.channels if self.shape.carries_latents else 0
        return super().exchanged + latent
