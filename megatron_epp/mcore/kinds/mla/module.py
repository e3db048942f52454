r"""Multi-latent attention (MLA) on chunks, with Megatron's projections.

    hidden --- q down, norm --- q up ----------------- rope --- Q
       \------ kv down --------- latent, norm - kv up ---------- K, V
                   \----------- rotary key ------------ rope ---/  shared by all heads

Every layer has its own rotary embedding and scale. ``project`` replaces
``get_query_key_value_tensors`` and computes Q, K and V with Megatron's modules. ``attend`` replaces
``_run_core_attention``, in which Megatron would pad V to the size of Q.

For later slices of a document, a slice caches K and V of all heads, because GPU kernels read K and
V of the whole context.

If Megatron's own linears compute the latents, Megatron 0.19 makes two errors with several
tensor-parallel ranks. This module corrects both. First, each rank's heads yield only a part of the
rotary key's gradient, and Megatron does not sum the parts. Second, without sequence parallelism,
the norm of the queries' latent has its full gradient on every rank, but finalize_model_grads sums
the gradients of every ``q_layernorm``.

Shape suffixes: t rows of this rank, s = t / TP rows with sequence parallelism, T rows of the chunk,
H heads of this rank, R channels of the latent of K and V, L channels of the latent of Q, P rotary
channels, D = qk_head_dim + P, V channels of a value.
"""

from dataclasses import dataclass
from typing import Any, override

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_epp.layers.attention.layer_attention import Attention
from megatron_epp.layers.attention.local import attend_parts, attention_parts
from megatron_epp.layers.attention.ulysses import Ulysses
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import (
    DroppedOutputs,
    RecomputeHandle,
    recomputable_all,
    saving_handles,
)
from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_norm
from megatron_epp.mcore.kinds.attention.module import SingleRank, attention_of
from megatron_epp.mcore.kinds.base import KeptShapes, KindModule, LayerPlace
from megatron_epp.mcore.kinds.local_layers import local_attention
from megatron_epp.mcore.kinds.mla.kind import MLAKind
from megatron_epp.mcore.kinds.mla.local import fix_local_mla

UP_PROJECTION = "mla_up_proj"  # Megatron's name for the projections of latents to Q, K and V


def install_mla(place: LayerPlace, kind: "type[MLALayer]") -> None:
    """Patch the MLA of a layer to compute chunks, and wrap its input norm for recompute."""
    around, (own, single_rank, ulysses) = place.layer.self_attention, attention_of(place)
    kind(around, own, single_rank, place.index, place.context, place.dropped, ulysses).install()
    wrap_norm(place.layer.input_layernorm, place.dropped)


class MLALayer:
    """MLA on chunks in layer ``layer`` of the stage; ``around`` is Megatron's MLASelfAttention.

    ``local`` is the attention of single-rank documents; documents have up to ``context`` tokens.
    """

    def __init__(
        self,
        around: Any,
        attention: Attention,
        local: Attention,
        layer: int,
        context: int,
        dropped: DroppedOutputs,
        ulysses: Ulysses | None,
    ):
        self.around, self.attention, self.layer = around, attention, layer
        self.local = local
        self.context, self.dropped, self.ulysses = context, dropped, ulysses
        self.stores_last_slice = attention.stores_last_slice
        self._projected: _Projected | None = None  # set by project for attend
        config = around.config
        self._tensor = config.tensor_model_parallel_size
        up = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
        self._queries = getattr(around, up)

    def install(self) -> None:
        """Replace Megatron's projections and core attention, and call :meth:`wrap_readers`."""
        around = self.around
        self._originals = around.get_query_key_value_tensors, around._run_core_attention
        around.get_query_key_value_tensors = self.project
        around._run_core_attention = self.attend
        self.wrap_readers()

    def wrap_readers(self, *more_readers: Any) -> None:
        """Wrap linears (and ``more_readers``) for recompute; correct ``q_layernorm``'s gradient."""
        around = self.around
        # All linears that read the input norm; only the last linear takes the norm's handle.
        if around.config.q_lora_rank is None:
            readers = around.linear_kv_down_proj, around.linear_q_proj, *more_readers
        else:
            readers = around.linear_q_down_proj, around.linear_kv_down_proj, *more_readers
        for reader in readers[:-1]:
            wrap_consumer(reader, self.dropped, last=False)
        wrap_consumer(readers[-1], self.dropped)
        wrap_consumer(around.linear_proj, self.dropped)
        norm = getattr(around, "q_layernorm", None)
        counted_twice = around.config.qk_layernorm and not around.config.sequence_parallel
        if norm is not None and counted_twice and self._tensor > 1:
            for parameter in norm.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient / self._tensor)

    # -------------------------------------------------------------- Q, K and V

    def project(
        self,
        hidden_s1E: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        **ignored: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return Q [T, H, D], K [T, H, D], V [T, H, V] of this rank's heads, None and None.

        With context parallelism, this method runs an all-to-all from rows to heads. It also sets
        the state for :meth:`attend`. If the input is not a chunk, Megatron's own function runs.
        """
        state: ChunkState | None = getattr(packed_seq_params, "state", None)
        if state is None:
            others = key_value_states, position_ids, packed_seq_params
            return self._originals[0](hidden_s1E, *others, **ignored)
        queries_sL, latent_sR, key_tP = self._compressed(hidden_s1E)
        table, factor = self._table(state, packed_seq_params.positions)
        rotary_t1P = self._rotated(key_tP[:, None], table, factor)

        def heads(queries_sL: Tensor, latent_sR: Tensor, rotary_t1P: Tensor) -> tuple[Tensor, ...]:
            qkv = self._heads(queries_sL, latent_sR, rotary_t1P, table, factor)
            return qkv if self.ulysses is None else attention_parts(self.ulysses, *qkv, state)

        compressed = queries_sL, latent_sR, rotary_t1P
        with_handles: tuple[tuple[Tensor, RecomputeHandle], ...] = ()
        if UP_PROJECTION in self.dropped.modules:
            qkv, handles = recomputable_all(heads, compressed)
            with_handles = tuple(zip(qkv, handles, strict=True))
        else:
            qkv = heads(*compressed)
        self._projected = _Projected(with_handles, qkv[3:])
        return *qkv[:3], None, None

    def _compressed(self, hidden_s1E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of the queries' projection, the normed latent, and the rotary key."""
        around, config = self.around, self.around.config
        parallel = self._tensor > 1 and config.sequence_parallel
        queries = hidden_s1E
        if config.q_lora_rank is not None:
            queries, _ = around.linear_q_down_proj(hidden_s1E)
            if queries.shape[-1] != config.q_lora_rank:
                queries = gather_from_tensor_model_parallel_region(queries)
                if parallel:
                    queries = scatter_to_sequence_parallel_region(queries)
        both, _ = around.linear_kv_down_proj(hidden_s1E)
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        if both.shape[-1] != sum(sizes):  # a shard of the channels, for all rows
            latent, key = gather_from_tensor_model_parallel_region(both).split(sizes, -1)
            key = copy_to_tensor_model_parallel_region(key)
            if parallel:
                latent = scatter_to_sequence_parallel_region(latent)
        else:
            latent, key = both.split(sizes, -1)
            if parallel:
                key = gather_from_sequence_parallel_region(key)
            elif self._tensor > 1:
                key = copy_to_tensor_model_parallel_region(key)
        queries, latent, key = (t.squeeze(1) for t in (queries, latent, key))
        if config.q_lora_rank is not None:
            queries = around.q_layernorm(queries)
        return queries, around.kv_layernorm(latent), key

    def _heads(
        self,
        queries_sL: Tensor,
        latent_sR: Tensor,
        rotary_t1P: Tensor,
        table: Tensor,
        factor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K and V of this rank's rows, with all heads of the tensor-parallel rank."""
        config = self.around.config
        q, _ = self._queries(queries_sL)
        kv, _ = self.around.linear_kv_up_proj(latent_sR)
        turned = config.qk_pos_emb_head_dim
        q_tHD = q.unflatten(-1, (-1, config.qk_head_dim + turned))
        kv_tHN = kv.unflatten(-1, (-1, config.qk_head_dim + config.v_head_dim))
        unrotated, turning = q_tHD.split([config.qk_head_dim, turned], -1)
        key, value = kv_tHN.split([config.qk_head_dim, config.v_head_dim], -1)
        query_tHD = torch.cat((unrotated, self._rotated(turning, table, factor)), -1)
        key_tHD = torch.cat((key, rotary_t1P.expand(-1, key.shape[1], -1)), -1)
        return query_tHD, key_tHD, value.contiguous()

    def _table(self, state: ChunkState, positions_t: Tensor) -> tuple[Tensor, float]:
        """Return the rotary table's rows [t, 1, 1, P] for ``positions_t``, and YaRN's factor."""

        def table() -> tuple[Tensor, float]:
            result = self.around.rotary_pos_emb(self.context, packed_seq=True)
            full_table, factor = result if isinstance(result, tuple) else (result, 1.0)
            return full_table.index_select(0, positions_t), factor

        return state.once("rotary table", table)  # all MLA layers share it

    def _rotated(self, x_tHP: Tensor, table: Tensor, factor: float) -> Tensor:
        """Apply the rotary embedding without fused kernels, which assume positions from 0."""
        return apply_rotary_pos_emb(
            x_tHP[:, None],
            table,
            config=self.around.config,
            mscale=factor,
            cp_group=SingleRank(),
            mla_rotary_interleaved=True,
        ).squeeze(1)

    # -------------------------------------------------------------- attention

    def attend(
        self,
        query_THD: Tensor,
        key_THD: Tensor,
        value_THV: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **ignored: Any,
    ) -> Tensor:
        """Return the output [t, H V] of this rank's rows, with all heads of the TP rank."""
        if getattr(packed_seq_params, "state", None) is None:
            return self._originals[1](
                query_THD, key_THD, value_THV, attention_mask, packed_seq_params, **ignored
            )
        taken, self._projected = self._projected, None
        assert taken is not None, "attention follows its projections"
        state, drop = packed_seq_params.state, "core_attn" in self.dropped.modules
        layer = state.layer(self.layer)
        parts = query_THD, key_THD, value_THV, *taken.local

        def sharded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, RecomputeHandle | None]:
            return self.attention(q, k, v, state, layer, drop)

        def local(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, RecomputeHandle | None]:
            return self.local(q, k, v, state.local, layer, drop)

        def attend() -> tuple[Tensor, RecomputeHandle | None]:
            return attend_parts(parts, state, self.ulysses, sharded, local)

        out, handle = saving_handles(taken.with_handles, attend) if taken.with_handles else attend()
        if handle is not None:
            self.dropped.add(out, handle)
        return out.flatten(1)


@dataclass(frozen=True, slots=True)
class _Projected:
    """Values that ``project`` passes to ``attend``.

    ``with_handles`` contains Q, K and V with their recompute handles, or nothing if they are not
    recomputed. ``local`` contains Q, K and V of the documents that this rank computes alone.
    """

    with_handles: tuple[tuple[Tensor, RecomputeHandle], ...]
    local: tuple[Tensor, ...]


class MLAModule(KindModule):
    """MLA layers in Megatron's modules."""

    KIND = MLAKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, MultiLatentAttention)

    @override
    def install(self, place: LayerPlace) -> None:
        install_mla(place, MLALayer)

    @override
    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        config, turned = layer.config, layer.config.qk_pos_emb_head_dim
        elastic: MLALayer = layer.self_attention._run_core_attention.__self__
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        heads = config.num_attention_heads // ranks
        shapes = (
            (context, heads, config.qk_head_dim + turned),
            (context, heads, config.v_head_dim),
        )
        return KeptShapes(shapes, bool(elastic.stores_last_slice))

    @override
    def local_layer(self, config: Any) -> Any:
        return local_attention(config, mla=True)

    @override
    def fix_local(self, layer: Any, config: Any) -> None:
        fix_local_mla(layer, config)
