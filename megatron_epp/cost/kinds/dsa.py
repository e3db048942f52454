"""DeepSeek sparse attention (DSA): an indexer scores all pairs, and attention uses the top-k keys.

Attention runs on latents. Queries and the single key of all heads are latents with a rotary part.
Later slices read this key and the indexer's key from a cache, and do not project them again.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_epp.cost.columns import WindowPairs
from megatron_epp.cost.kinds.base import (
    ATTENTION_BACKWARD,
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    CarryOver,
    ContextWorkspace,
    Decoder,
    RecomputedModule,
    Sublayer,
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


class DSAPart(MLAPart):
    """Multi-latent attention over the keys that an indexer selects."""

    WORD, ALONE, CP = "sparse", "sparse", False

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has an indexer."""
        return shape.index_heads > 0

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of MLA, with those of the indexer and of attention on latents."""
        hidden, mla = model.hidden, super().of(model, shape)
        key = shape.kv_rank + shape.rotary_size  # one key for all heads
        absorbed = model.heads * key  # queries of all heads, in the latent space
        attended = model.heads * shape.kv_rank  # outputs of all heads, in the latent space
        query = model.heads * (model.head_size + shape.rotary_size)
        output = model.heads * (shape.value_size or model.head_size)
        of_index = shape.index_heads * shape.index_size
        of_queries = shape.query_rank or hidden
        of_keys = shape.kv_rank * model.heads * model.head_size
        latents = 2 * (shape.query_rank + shape.kv_rank) + shape.rotary_size
        numbers = _PER_NUMBER * shape.chosen_keys
        # the indexer's keys before and after their norm
        index = of_index + shape.index_heads + 2 * shape.index_size + numbers
        index_parameters = of_queries * of_index + hidden * (shape.index_size + shape.index_heads)
        carried = CarryOver(key + shape.index_size)  # the shared key and the indexer's
        # Tensors of a query block by keys, in float32; B adds gradients of the context's keys.
        forward, backward = (each * float(GRADIENT_BYTES * CHOICE_BLOCK) for each in CHOICE_TENSORS)
        gradients = float((ELEMENT_BYTES + GRADIENT_BYTES) * carried.channels)
        return replace(
            mla,
            parameters=mla.parameters + index_parameters + 2 * shape.index_size,
            saved=2 * hidden + latents + query + absorbed + key + attended + output + index,
            # ``taught_on_all`` adds QK' for the indexer's loss.
            flops_per_pair=2.0 * (of_index + shape.index_heads + absorbed * shape.taught_on_all),
            work={
                WindowPairs(shape.chosen_keys): Work(
                    2.0 * (absorbed + attended), ATTENTION_BACKWARD, attention=True
                )
            },
            workspaces={
                Kind.FORWARD: ContextWorkspace(float(ELEMENT_BYTES * carried.channels), forward),
                Kind.BACKWARD: ContextWorkspace(gradients, backward),
            },
            carried=carried,
            stored=carried.channels,
            stored_unless="",
            recomputed={
                **mla.recomputed,
                "core_attn": RecomputedModule(attended + numbers, pairs=True),
                "mla_up_proj": RecomputedModule(query + absorbed, of_queries * query + of_keys),
            },
            exchanged=0,  # without context parallelism
        )
