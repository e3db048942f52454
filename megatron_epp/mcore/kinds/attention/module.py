"""Multi-head attention on chunks, in the forward of a layer's core attention."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, override

from megatron.core.transformer.attention import Attention as MegatronAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_epp.layers.attention.layer_attention import Attention
from megatron_epp.layers.attention.local import attend_parts, attention_parts
from megatron_epp.layers.attention.ulysses import Ulysses
from megatron_epp.layers.recompute.outputs import DroppedOutputs, RecomputeHandle
from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_norm
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.kinds.attention.kind import AttentionKind
from megatron_epp.mcore.kinds.base import KeptShapes, KindModule, LayerPlace
from megatron_epp.mcore.kinds.local_layers import fix_local_attention, local_attention


class ElasticAttention:
    """Replacement of the forward of a layer's core attention.

    The module itself is not replaced, so checkpoint keys do not change. In shapes, t is the number
    of the chunk's rows on this rank, H the number of heads, and D the channels of a head.

    Attributes:
        original: Megatron's forward, called for inputs that are not chunks.
        attention: Attention over documents that are sharded over the context-parallel ranks.
        local: Attention over documents that this rank computes alone.
        layer: Index of the layer in the stage.
        dropped: Outputs that the layer drops in the forward and recomputes in the backward.
        ulysses: All-to-all between rows and heads; None without context parallelism.
    """

    def __init__(
        self,
        original: Callable[..., Tensor],
        attention: Attention,
        local: Attention,
        layer: int,
        dropped: DroppedOutputs,
        ulysses: Ulysses | None,
    ):
        self.original, self.attention, self.local, self.layer = original, attention, local, layer
        self.dropped, self.ulysses = dropped, ulysses
        self.stores_last_slice = attention.stores_last_slice

    def __call__(
        self,
        query_tHD: Tensor,
        key_tGD: Tensor,
        value_tGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Tensor:
        """Compute the attention of a chunk and return the output [t, H D].

        With context parallelism, this runs an all-to-all before and after the attention.
        """
        if not isinstance(packed_seq_params, ChunkParams):
            inputs = query_tHD, key_tGD, value_tGD, attention_mask
            return self.original(*inputs, packed_seq_params=packed_seq_params, **others)
        state = packed_seq_params.state
        layer = state.layer(self.layer)
        drop = "core_attn" in self.dropped.modules
        qkv = query_tHD, key_tGD, value_tGD
        if self.ulysses is None:
            out, handle = self.attention(*qkv, state, layer, drop)
        else:

            def local(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, RecomputeHandle | None]:
                assert state.local is not None, "of a chunk with local documents"
                return self.local(q, k, v, state.local, layer, drop)

            out, handle = attend_parts(
                attention_parts(self.ulysses, *qkv, state),
                state,
                self.ulysses,
                lambda q, k, v: self.attention(q, k, v, state, layer, drop),
                local,
            )
        if handle is not None:
            self.dropped.add(out, handle)
        return out.flatten(1)


class SingleRank:
    """Stand-in for a process group of one rank, with the methods that rotary embeddings call."""

    def size(self) -> int:
        """Return 1."""
        return 1

    def rank(self) -> int:
        """Return 0."""
        return 0


def install_heads(place: LayerPlace) -> None:
    """Replace the core attention's forward in a layer, and wrap modules for recompute."""
    around, dropped = place.layer.self_attention, place.dropped
    core, (own, single_rank, ulysses) = around.core_attention, attention_of(place)
    core.forward = ElasticAttention(core.forward, own, single_rank, place.index, dropped, ulysses)
    wrap_norm(place.layer.input_layernorm, dropped)
    for reader in (around.linear_qkv, around.linear_proj):
        wrap_consumer(reader, dropped)


def attention_of(place: LayerPlace) -> tuple[Attention, Attention, Ulysses | None]:
    """Disable Megatron's context parallelism in a layer, and return the replacements.

    Returns:
        The attention over documents that are sharded over the context-parallel ranks, the
        attention over documents that this rank computes alone, and the all-to-all between rows and
        heads. Without context parallelism, the all-to-all is None.
    """
    around = place.layer.self_attention
    ranks = around.pg_collection.cp
    ulysses = Ulysses(ranks) if ranks.size() > 1 else None
    of_layer = partial(_of_layer, around.config, place.layer.layer_number, around.core_attention)
    own = single_rank = of_layer(place.attention, ranks)
    if ulysses is not None:
        single_rank = of_layer(place.attention.all_heads, SingleRank())
    # Megatron would shard the rotary table over context-parallel ranks, but the table contains only
    # the positions of this rank's rows.
    around.pg_collection = copy.copy(around.pg_collection)
    around.pg_collection.cp = SingleRank()
    return own, single_rank, ulysses


def _of_layer(
    config: Any, number: int, core_attention: Any, attention: Attention, ranks: Any
) -> Attention:
    """Return ``attention`` for layer ``number`` with its window and the sinks of this rank's heads.

    The sinks remain parameters of ``core_attention``.
    """
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)
    sinks_H = getattr(core_attention, "softmax_offset", None)
    if not windowed and sinks_H is None:
        return attention
    before = config.window_size[0] if windowed else None
    if sinks_H is None:
        return attention.of_layer(before, lambda: None)
    heads = len(sinks_H) // ranks.size()
    local_heads = slice(ranks.rank() * heads, (ranks.rank() + 1) * heads)
    # Read at every use: DDP later moves parameters to other storage.
    return attention.of_layer(before, lambda: core_attention.softmax_offset[local_heads])


class AttentionModule(KindModule):
    """Multi-head attention in Megatron's modules."""

    KIND = AttentionKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, MegatronAttention)

    @override
    def install(self, place: LayerPlace) -> None:
        install_heads(place)

    @override
    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        config = layer.config
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        shape = context, max(1, config.num_query_groups // ranks), config.kv_channels
        last = layer.self_attention.core_attention.forward.stores_last_slice
        return KeptShapes((shape, shape), bool(last))

    @override
    def local_layer(self, config: Any) -> Any:
        return local_attention(config)

    @override
    def fix_local(self, layer: Any, config: Any) -> None:
        fix_local_attention(layer, config)
