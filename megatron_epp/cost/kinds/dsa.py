"""DeepSeek's sparse attention: an indexer scores every pair, and latents attend to the best keys of
each query alone.

Queries and the one key of all heads are latents with a rotated part: later slices want that key and
the indexer's, and nothing is made of them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.columns import Column, WindowPairs
from megatron_epp.cost.kinds.base import (
    ATTENTION_BACKWARD,
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    CarryOver,
    ContextWorkspace,
    RecomputedModule,
    Work,
)
from megatron_epp.cost.kinds.mla import MLAPart, MLASizes
from megatron_epp.cost.kinds.window import WindowSizes
from megatron_epp.ir import Kind

# Numbers of a block of rows that choose their keys, in each of the tensors that are as wide as what
# the rows see, and how many of these live at a time in forward and in backward.
CHOICE_BLOCK = 2**24
CHOICE_TENSORS = 4, 6
_PER_NUMBER = 2  # channels, of two bytes, that one of a chosen key takes


@dataclass(frozen=True)
class DSASizes(MLASizes, WindowSizes):
    """The sizes of an indexer.

    index_heads     of the indexer's queries; 0: attention is over all keys
    index_size      channels of each, and of its keys
    chosen_keys     that a query attends to at most
    taught_on_all   whether the indexer learns what attention makes of all keys, chosen or not
    """

    index_heads: int = 0
    index_size: int = 0
    chosen_keys: int = 0
    taught_on_all: bool = False

    def require(self) -> None:
        super().require()
        for name in ("index_size", "chosen_keys"):
            size = getattr(self, name)
            if bool(size) != bool(self.index_heads):
                wanted = "at least 1" if self.index_heads else "index_heads beside it"
                raise ValueError(f"{name} {size}: expected {wanted}")
        if self.index_heads and not self.kv_rank:
            raise ValueError(f"index_heads {self.index_heads}: expected kv_rank beside it")
        if self.taught_on_all and not self.index_heads:
            raise ValueError("taught_on_all true: expected index_heads beside it")
        if not self.index_heads:
            return
        if self.index_size < self.rotary_size:
            raise ValueError(
                f"index_size {self.index_size}: expected at least rotary_size, {self.rotary_size}"
            )
        if self.window:
            raise ValueError(f"window {self.window}: expected 0 beside index_heads")
        if not self.carries_latents:
            raise ValueError("carries_latents false: index_heads keep latents; leave it out")


class DSAPart(MLAPart):
    """Attention in latents, over the keys that an indexer chooses."""

    WORD, ALONE, CP = "sparse", "sparse", False

    @classmethod
    def there(cls, shape: Any) -> bool:
        return shape.index_heads > 0

    @property
    def _key(self) -> int:
        """Channels of the key that all heads have in common."""
        return self.shape.kv_rank + self.shape.rotary_size

    @property
    def _index_hidden(self) -> int:
        return self.shape.index_heads * self.shape.index_size

    @property
    def _absorbed(self) -> int:
        """Channels of the queries of all heads, in latents."""
        return self.model.heads * self._key

    @property
    def _attended(self) -> int:
        """Channels of all heads' outputs, in latents."""
        return self.model.heads * self.shape.kv_rank

    @property
    def parameters(self) -> int:
        hidden, shape = self.model.hidden, self.shape
        query = (shape.query_rank or hidden) * self._index_hidden
        key = hidden * shape.index_size + 2 * shape.index_size
        return super().parameters + query + key + hidden * shape.index_heads

    @property
    def flops_per_pair(self) -> float:
        """The indexer's, and what it is taught by."""
        scores = self._index_hidden + self.shape.index_heads
        return 2.0 * (scores + self._absorbed * self.shape.taught_on_all)

    @property
    def work(self) -> Mapping[Column, Work]:
        """Attention to the keys that a query has chosen."""
        flops = 2.0 * (self._absorbed + self._attended)
        chosen = WindowPairs(self.shape.chosen_keys)
        return {chosen: Work(flops, ATTENTION_BACKWARD, attention=True)}

    @property
    def workspaces(self) -> Mapping[Kind, ContextWorkspace]:
        """Blocks of rows, their context side by side, and in backward its gradients."""
        channels, (forward, backward) = self.carried.channels, CHOICE_TENSORS
        block = float(GRADIENT_BYTES * CHOICE_BLOCK)  # in float32, too
        gradients = float((ELEMENT_BYTES + GRADIENT_BYTES) * channels)
        return {
            Kind.FORWARD: ContextWorkspace(float(ELEMENT_BYTES * channels), forward * block),
            Kind.BACKWARD: ContextWorkspace(gradients, backward * block),
        }

    @property
    def saved(self) -> int:
        shape, latents = self.shape, 2 * self._ranks + self.shape.rotary_size
        of_queries = self.query_hidden + self._absorbed
        outputs = self._attended + self.output_hidden
        # The indexer's queries and weights; its keys before and behind their norm; what it chose.
        index = self._index_hidden + shape.index_heads + 2 * shape.index_size
        index += _PER_NUMBER * shape.chosen_keys
        return 2 * self.model.hidden + latents + of_queries + self._key + outputs + index

    def stored(self, modules: tuple[str, ...]) -> int:
        return self.carried.channels

    @property
    def carried(self) -> CarryOver:
        return CarryOver(self._key + self.shape.index_size)

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        of_queries = self.shape.query_rank or self.model.hidden
        of_keys = self.shape.kv_rank * self.model.heads * self.model.head_size
        dropped = self._attended + _PER_NUMBER * self.shape.chosen_keys
        return {
            **super().recomputed,
            "core_attn": RecomputedModule(dropped, pairs=True),
            "mla_up_proj": RecomputedModule(
                self.query_hidden + self._absorbed, of_queries * self.query_hidden + of_keys
            ),
        }

    @property
    def exchanged(self) -> int:
        """There is none: context parallelism is refused."""
        return 0
