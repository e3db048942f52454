"""DeepSeek sparse attention (DSA): an indexer scores all pairs, and attention uses the top-k keys.

Attention runs on latents. Queries and the single key of all heads are latents with a rotary part.
Later slices need this key and the indexer's key, and do not project either of them again.
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

# Keys are selected for one block of rows at a time. CHOICE_BLOCK: elements of a tensor over a block
# and its context. CHOICE_TENSORS: number of such tensors at the same time in forward, in backward.
CHOICE_BLOCK = 2**24
CHOICE_TENSORS = 4, 6
_PER_NUMBER = 2  # channels (2 bytes each) of the 4-byte index of a selected key


@dataclass(frozen=True)
class DSASizes(MLASizes, WindowSizes):
    """Sizes of an indexer.

    Attributes:
        index_heads: heads of the indexer's queries; 0: attention is over all keys.
        index_size: channels of each head, and of the indexer's keys.
        chosen_keys: maximum number of keys that a query attends to (top-k).
        taught_on_all: whether the indexer's loss uses attention over all keys, not only over the
            selected ones.
    """

    index_heads: int = 0
    index_size: int = 0
    chosen_keys: int = 0
    taught_on_all: bool = False

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""
        super().require()
        for name in ("index_size", "chosen_keys"):
            size = getattr(self, name)
            if bool(size) != bool(self.index_heads):
                wanted = "at least 1" if self.index_heads else "index_heads with it"
                raise ValueError(f"{name} {size}: expected {wanted}")
        if self.index_heads and not self.kv_rank:
            raise ValueError(f"index_heads {self.index_heads}: expected kv_rank with it")
        if self.taught_on_all and not self.index_heads:
            raise ValueError("taught_on_all true: expected index_heads with it")
        if not self.index_heads:
            return
        if self.index_size < self.rotary_size:
            raise ValueError(
                f"index_size {self.index_size}: expected at least rotary_size, {self.rotary_size}"
            )
        if self.window:
            raise ValueError(f"window {self.window}: expected 0 with index_heads")
        if not self.carries_latents:
            raise ValueError("carries_latents false: index_heads keep latents; leave it out")


class DSAPart(MLAPart):
    """Multi-latent attention over the keys that an indexer selects."""

    WORD, ALONE, CP = "sparse", "sparse", False

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has an indexer."""
        return shape.index_heads > 0

    @property
    def _key(self) -> int:
        return self.shape.kv_rank + self.shape.rotary_size  # one key for all heads

    @property
    def _index_hidden(self) -> int:
        return self.shape.index_heads * self.shape.index_size

    @property
    def _absorbed(self) -> int:
        return self.model.heads * self._key  # queries of all heads, in the latent space

    @property
    def _attended(self) -> int:
        return self.model.heads * self.shape.kv_rank  # outputs of all heads, in the latent space

    @property
    def parameters(self) -> int:
        """Parameters of MLA and of the indexer."""
        hidden, shape = self.model.hidden, self.shape
        query = (shape.query_rank or hidden) * self._index_hidden
        key = hidden * shape.index_size + 2 * shape.index_size
        return super().parameters + query + key + hidden * shape.index_heads

    @property
    def flops_per_pair(self) -> float:
        """Forward flops of the indexer per pair; ``taught_on_all`` adds QK' for its loss."""
        scores = self._index_hidden + self.shape.index_heads
        return 2.0 * (scores + self._absorbed * self.shape.taught_on_all)

    @property
    def work(self) -> Mapping[Column, Work]:
        """Work of attention per pair of a query and a key that the indexer selects for it."""
        flops = 2.0 * (self._absorbed + self._attended)
        chosen = WindowPairs(self.shape.chosen_keys)
        return {chosen: Work(flops, ATTENTION_BACKWARD, attention=True)}

    @property
    def workspaces(self) -> Mapping[Kind, ContextWorkspace]:
        """Bytes of context keys and of tensors, query block by keys; B adds key gradients."""
        channels, (forward, backward) = self.carried.channels, CHOICE_TENSORS
        block = float(GRADIENT_BYTES * CHOICE_BLOCK)  # in float32, too
        gradients = float((ELEMENT_BYTES + GRADIENT_BYTES) * channels)
        return {Kind.FORWARD: ContextWorkspace(float(ELEMENT_BYTES * channels), forward * block),
                Kind.BACKWARD: ContextWorkspace(gradients, backward * block)}  # fmt: skip

    @property
    def saved(self) -> int:
        """Channels saved from F to B; the indexer's keys count before and after their norm."""
        shape, latents = self.shape, 2 * self._ranks + self.shape.rotary_size
        of_queries = self.query_hidden + self._absorbed
        outputs = self._attended + self.output_hidden
        index = self._index_hidden + shape.index_heads + 2 * shape.index_size
        index += _PER_NUMBER * shape.chosen_keys
        return 2 * self.model.hidden + latents + of_queries + self._key + outputs + index

    def stored(self, modules: tuple[str, ...]) -> int:
        """Return the channels of both keys, which are in the buffer of a slice's document."""
        return self.carried.channels

    @property
    def carried(self) -> CarryOver:
        """The shared key and the indexer's key of every token."""
        return CarryOver(self._key + self.shape.index_size)

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        """Modules that selective recomputation supports."""
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
        """Always 0: DSA does not support context parallelism."""
        return 0
