"""DeepSeek sparse attention (DSA) on chunks, with Megatron's projections and indexer.

In Megatron's AbsorbedMLASelfAttention, the up-projection of K is applied to the queries, and the
up-projection of V is applied to the output of the attention. All heads share one key, which
consists of the latent and a rotary part. ``project`` replaces ``get_query_key_value_tensors`` and
returns Q and this key. ``attend`` replaces the forward of the core attention: it chooses keys and
computes the attention (layers/dsa.py). The indexer reads the layer's input and the queries' latent.

As in Megatron, the inputs of the indexer are detached, so the indexer learns from its own loss
only. The indexer's weights and their gradients are equal on all tensor-parallel ranks.

On CPU-only hosts, DSA layers consist of Megatron's local modules, and of linears whose full weight
is on every tensor-parallel rank. Checkpoint keys are the keys of Transformer Engine's layers.

Shape suffixes: t rows of this rank, s = t / TP rows with sequence parallelism, T rows of the chunk,
H heads of this rank, R channels of the latent of K and V, L channels of the latent of Q, P rotary
channels, D = R + P, V channels of a value, J heads of the indexer, I channels of its heads.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, override

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
    get_moe_layer_pattern,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_epp.layers.attention.layer_attention import Attention
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.dsa import Index, Sparse, attend_chosen
from megatron_epp.layers.recompute.outputs import (
    RecomputeHandle,
    recomputable_all,
    saving_handle,
    saving_handles,
)
from megatron_epp.mcore.kinds.base import KeptShapes, LayerPlace
from megatron_epp.mcore.kinds.dsa.kind import DSAKind, indexer_learns
from megatron_epp.mcore.kinds.local_layers import NORM_OF_MLP, block_with, local_attention
from megatron_epp.mcore.kinds.mla.module import (
    UP_PROJECTION,
    MLALayer,
    MLAModule,
    install_mla,
)
from megatron_epp.mcore.kinds.moe.local import DuplicatedLinear
from megatron_epp.mcore.kinds.positions import PositionedRotary


@dataclass(frozen=True, slots=True)
class _Absorbed:
    """Values that ``project`` passes to ``attend``.

    ``weight_NR`` is the up-projection [N, R] of K and V. ``with_handles`` contains Q with its
    recompute handle if Q is recomputed in the backward; otherwise it is empty.
    """

    weight_NR: Tensor
    with_handles: tuple[tuple[Tensor, RecomputeHandle], ...]


class DSALayer(MLALayer):
    """Replacement of methods of ``around``, an AbsorbedMLASelfAttention of Megatron, for chunks."""

    def __init__(self, around: Any, attention: Attention, *others: Any):
        super().__init__(around, attention, *others)
        self.stores_last_slice = False
        self._absorbed: _Absorbed | None = None  # set by project for attend
        self._indexer = around.core_attention.indexer

    @override
    def install(self) -> None:
        around, indexer = self.around, self._indexer
        core = around.core_attention
        self._originals = around.get_query_key_value_tensors, core.forward
        around.get_query_key_value_tensors = self.project
        core.forward = self.attend
        indexer.rotary_pos_emb = PositionedRotary(indexer.rotary_pos_emb, self.context, False)
        self.wrap_readers(indexer.linear_wk, indexer.linear_weights_proj)

    def project(  # type: ignore[override]
        self,
        hidden_s1E: Tensor,
        key_value_states: Tensor | None = None,
        packed_seq_params: Any = None,
        **ignored: Any,
    ) -> tuple[Tensor, ...]:
        """Return Q [T, H, D], the key of all heads [T, 1, D], and the queries' latent [s, L].

        If the input is not a chunk, return Megatron's own tensors.
        """
        state: ChunkState | None = getattr(packed_seq_params, "state", None)
        if state is None:
            return self._originals[0](hidden_s1E, key_value_states, packed_seq_params, **ignored)
        queries_sL, latent_tR, key_tP = self._compressed(hidden_s1E)
        table, factor = self._table(state, packed_seq_params.positions)
        if self._tensor > 1:  # the gradient of the latent is summed over the ranks' heads
            latent_tR = gather_from_sequence_parallel_region(latent_tR)
        rotary_t1P = self._rotated(key_tP[:, None], table, factor)
        key_T1D = torch.cat((latent_tR[:, None], rotary_t1P), -1)

        def heads(queries_sL: Tensor) -> tuple[Tensor, ...]:
            """Return Q and a view of the up-projection; autograd sums the weight's gradients."""
            weight_NR = self.around.linear_kv_up_proj.weight
            return self._queries_of(queries_sL, weight_NR, table, factor), weight_NR.view_as(
                weight_NR
            )

        with_handles: tuple[tuple[Tensor, RecomputeHandle], ...] = ()
        if UP_PROJECTION in self.dropped.modules:
            (query_THD, weight_NR), handles = recomputable_all(heads, (queries_sL,))
            with_handles = ((query_THD, handles[0]),)
        else:
            query_THD, weight_NR = heads(queries_sL)
        self._absorbed = _Absorbed(weight_NR, with_handles)
        return query_THD, key_T1D, queries_sL

    def _queries_of(
        self, queries_sL: Tensor, weight_NR: Tensor, table: Tensor, factor: float
    ) -> Tensor:
        config = self.around.config
        q, _ = self._queries(queries_sL)
        sizes = [config.qk_head_dim, config.qk_pos_emb_head_dim]
        unrotated, turning = q.unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        of_key_HKR, _ = self._up_projections(weight_NR)
        absorbed_THR = torch.einsum("thk,hkr->thr", unrotated, of_key_HKR)
        return torch.cat((absorbed_THR, self._rotated(turning, table, factor)), -1)

    def _up_projections(self, weight_NR: Tensor) -> tuple[Tensor, Tensor]:
        """Return the up-projections of K and V, split by head."""
        sizes = [self.around.config.qk_head_dim, self.around.config.v_head_dim]
        of_keys, of_values = weight_NR.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
        return of_keys, of_values

    def attend(  # type: ignore[override]
        self,
        query_THD: Tensor,
        key_T1D: Tensor,
        value: None = None,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Tensor:
        """Return the output [T, H V]; the indexer reads the layer input ``x`` and latent ``qr``."""
        state: ChunkState | None = getattr(packed_seq_params, "state", None)
        if state is None:
            inputs = query_THD, key_T1D, value, attention_mask
            return self._originals[1](*inputs, packed_seq_params=packed_seq_params, **others)
        absorbed, self._absorbed = self._absorbed, None
        assert absorbed is not None, "attention follows its projections"
        config, drop = self.around.config, "core_attn" in self.dropped.modules
        coefficient = config.dsa_indexer_loss_coeff or 0.0
        trains_indexer = state.training and torch.is_grad_enabled() and coefficient > 0
        with nullcontext() if trains_indexer else torch.no_grad():
            read = others["x"].detach(), others["qr"].detach()
            index = Index(*self._index(*read, packed_seq_params))
        how = Sparse(
            self.around.softmax_scale,
            config.dsa_indexer_topk,
            config.kv_lora_rank,
            config.dsa_indexer_scoring_relu,
            coefficient * self._loss_scale() if trains_indexer else 0.0,
            config.dsa_indexer_use_sparse_loss,
            self.around.pg_collection.tp if self._tensor > 1 else None,
        )
        inside = state, state.layer(self.layer), how, trains_indexer, drop
        out_THR, loss, handle = saving_handles(
            absorbed.with_handles, lambda: attend_chosen(query_THD, key_T1D, index, *inside)
        )
        if trains_indexer:
            DSAIndexerLossLoggingHelper.save_loss_to_tracker(
                loss / self._loss_scale(),
                self.around.core_attention.layer_number,
                config.num_layers,
            )

        def values(out_THR: Tensor, weight_NR: Tensor) -> Tensor:
            _, of_values_HVR = self._up_projections(weight_NR)
            return torch.einsum("thr,hvr->thv", out_THR, of_values_HVR).flatten(1)

        if handle is None:
            return values(out_THR, absorbed.weight_NR)
        (out,), (again,) = saving_handle(
            out_THR,
            handle,
            lambda: recomputable_all(lambda *x: (values(*x),), (out_THR, absorbed.weight_NR)),
        )
        self.dropped.add(out, again)
        return out

    def _index(self, x_s1E: Tensor, queries_sL: Tensor, params: Any) -> tuple[Tensor, ...]:
        """Return the indexer's queries [T, J, I], their weights [T, J] and keys [T, 1, I]."""
        query_T1JI, key_T1I, weight_T1J = self._indexer.forward_before_topk(
            x_s1E, queries_sL, params
        )
        return query_T1JI.squeeze(1), weight_T1J.squeeze(1), key_T1I

    def _loss_scale(self) -> Any:
        """Return the optimizer's loss scale, by which the indexer's own loss is multiplied."""
        scale = self.around.config.grad_scale_func
        return 1.0 if scale is None else scale(torch.ones(())).reshape(())


# ------------------------------------------------------------------ on CPU-only hosts


class _Duplicated(DuplicatedLinear):
    """DuplicatedLinear whose constructor accepts the arguments of Megatron's indexer."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **_: Any):
        super().__init__(inputs, outputs, config, init_method)


class _Modules(LocalSpecProvider):
    """Megatron's local modules, with :class:`_Duplicated` as the linear."""

    @override
    def linear(self) -> type:
        return _Duplicated


def _sparse(config: Any) -> ModuleSpec:
    """Return the spec of DSA with column-parallel down-projections."""
    module = get_dsa_module_spec_for_backend(config, _Modules())
    down = {f"linear_{one}_down_proj": ColumnParallelLinear for one in ("q", "kv")}
    return replace(module, submodules=replace(module.submodules, **down))


def local_dsa_block(config: Any, vp_stage: int | None) -> Any:
    """Return the spec of a GPTModel's layers on a stage, with DSA in every layer."""
    attention = _sparse(config)
    experts = get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers

    def changed(number: int, _: TransformerLayerSubmodules) -> dict[str, Any]:
        # The norms of attention and of MoE are separate modules, as in Transformer Engine's layers.
        keys = {} if experts[number] else {**NORM_OF_MLP}
        return {"self_attention": attention, "sharded_state_dict_keys_map": keys}

    return block_with(config, vp_stage, changed)


class DSAModule(MLAModule):
    """DSA layers in Megatron's modules."""

    KIND = DSAKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, AbsorbedMLASelfAttention)

    def prepare(self, config: Any) -> None:
        """Create the log entries of the indexers' losses, also on stages without DSA layers."""
        if not indexer_learns(config):
            return
        logged = DSAIndexerLossLoggingHelper.tracker
        if len(logged.get("values", ())) != config.num_layers:
            logged["values"] = torch.zeros(config.num_layers, device=torch.cuda.current_device())

    @override
    def install(self, place: LayerPlace) -> None:
        install_mla(place, DSALayer)

    @override
    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        config = layer.config
        key = config.kv_lora_rank + config.qk_pos_emb_head_dim
        return KeptShapes(((context, 1, key), (context, 1, config.dsa_indexer_head_dim)))

    @override
    def local_layer(self, config: Any) -> Any:
        return local_attention(config, _sparse(config), {})

    @override
    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        if config.experimental_attention_variant not in self.KIND.VARIANTS:
            return None
        return local_dsa_block(config, vp_stage)

    def fix_local(self, layer: Any, config: Any) -> None:
        """Do nothing: the spec of DSA is complete."""
