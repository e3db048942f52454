"""A chunk's state on its way through Megatron's layers, and what takes it out again."""

import copy
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from megatron_epp.layers.attention.local import attend_parts, attention_parts
from megatron_epp.layers.attention.ulysses import Ulysses
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.experts.current_chunk import CurrentChunk, note_in_layer, taken_along
from megatron_epp.layers.recompute.outputs import DroppedOutputs, RecomputeHandle
from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_layer, wrap_mlp, wrap_norm
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.model.attention import Attention
from megatron_epp.mcore.model.experts.router import install_in_experts, prepare_log
from megatron_epp.mcore.model.hybrid.stack import has_attention, has_mlp, take_output_processor
from megatron_epp.mcore.model.latent_attention import LatentLayer


class ElasticAttention:
    """In place of the forward of a layer's core attention: the module stays, so checkpoints keep
    their keys.

    t rows of this rank, T of the chunk: more where ``ulysses`` exchanges rows for heads.
    ``local``: of the documents that this rank computes alone.
    """

    def __init__(
        self,
        attention: Attention,
        local: Attention,
        layer: int,
        dropped: DroppedOutputs,
        ulysses: Ulysses | None,
    ):
        self.attention, self.local, self.layer = attention, local, layer
        self.dropped, self.ulysses = dropped, ulysses
        self.stores_last_slice = attention.stores_last_slice

    def __call__(
        self,
        query_tHD: Tensor,
        key_tGD: Tensor,
        value_tGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: ChunkParams,
        **ignored: Any,
    ) -> Tensor:
        state = packed_seq_params.state
        drop = "core_attn" in self.dropped.modules
        qkv = query_tHD, key_tGD, value_tGD

        def local(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, RecomputeHandle | None]:
            assert state.local is not None, "of a chunk with local documents"
            return self.local(q, k, v, state.local, self.layer, drop)

        out, handle = attend_parts(
            qkv if self.ulysses is None else attention_parts(self.ulysses, *qkv, state),
            state,
            self.ulysses,
            lambda q, k, v: self.attention(q, k, v, state, self.layer, drop),
            local,
        )
        if handle is not None:
            self.dropped.add(out, handle)
        return out.flatten(1)


class PositionedRotary(nn.Module):
    """The rotary embedding of each row's own position instead of rows 0, 1, 2, ...

    Wraps Megatron's, whose table is made once for the whole context: its cache is keyed by length.
    The rows are one sequence to Megatron, with a table of their own, so a kernel that counts
    positions from 0 in every sequence (``fused``) finds the right ones, too.
    """

    def __init__(self, rotary: nn.Module, context: int, fused: bool):
        super().__init__()
        self.rotary, self.context, self.fused = rotary, context, fused
        self._positions: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> int:
        params = args[-1]
        self._positions = params.positions
        if self.fused:
            borders = on_device(params.cu_seqlens_q, params.positions.device)
            params.cu_seqlens_q = params.cu_seqlens_kv = borders
        return self.context

    def forward(self, length: int, **ignored: Any) -> Tensor | tuple[Tensor, float]:
        positions, self._positions = self._positions, None
        # packed_seq: the whole table, of which Megatron's context parallelism would take a part.
        made = self.rotary(length, packed_seq=True)
        if isinstance(made, tuple):  # YaRN's, with the factor that attention applies
            return made[0].index_select(0, positions), made[1]
        return made.index_select(0, positions)


class _Alone:
    """A process group of this rank only, as far as the rotary embedding asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def install_in_model(model: GPTModel | HybridModel, context: int, attention: Attention) -> None:
    """Make ``model`` compute chunks: its attention, its rotary embedding, its layers' recompute.

    ``context``: the most inputs of a document.
    """
    add_every_gradient(model)
    if isinstance(model, HybridModel):
        take_output_processor(model)
    if getattr(model, "rotary_pos_emb", None) is not None:
        fused = model.config.apply_rope_fusion
        model.rotary_pos_emb = PositionedRotary(model.rotary_pos_emb, context, fused)
    if model.config.num_moe_experts:
        prepare_log(model.config)
    checkpoint = partial(_checkpoint, model.config.distribute_saved_activations)
    for index, layer in enumerate(model.decoder.layers):
        dropped = DroppedOutputs()
        consumers: tuple[nn.Module, ...] = ()
        if has_attention(layer):
            consumers = _install_in_attention(layer, index, context, attention, dropped)
        experts = isinstance(layer.mlp, MoELayer)
        if experts:
            current_chunk = CurrentChunk()
            install_in_experts(layer.mlp, index, current_chunk, dropped)
            layer.forward = note_in_layer(layer.forward, current_chunk, _state_of)
            with taken_along(layer.mlp, current_chunk):
                wrap_mlp(layer.mlp, dropped)
        elif has_mlp(layer):
            consumers = (*consumers, layer.mlp.linear_fc1)
        layer.forward = wrap_layer(layer.forward, index, _state_of, checkpoint, dropped)
        if index == 0:
            layer.forward = _from_here_on(layer.forward)
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            if any(True for _ in norm.parameters()):  # else a linear has it, or none is
                wrap_norm(norm, dropped)
        for consumer in consumers:
            wrap_consumer(consumer, dropped)
        if has_mlp(layer) and not experts:
            wrap_mlp(layer.mlp, dropped)


def _install_in_attention(
    layer: Any, index: int, context: int, attention: Attention, dropped: DroppedOutputs
) -> tuple[nn.Module, ...]:
    """Make the attention of layer ``index`` of the stage that of chunks; its linears that read what
    the layer may drop."""
    around = layer.self_attention
    ranks = around.pg_collection.cp
    ulysses = Ulysses(ranks) if ranks.size() > 1 else None
    of_layer = partial(_of_layer, around.config, layer.layer_number, around.core_attention)
    own = whole = of_layer(attention, ranks)
    if ulysses is not None:
        whole = of_layer(attention.whole, _Alone())
    latent = isinstance(around, MultiLatentAttention)
    if latent:
        LatentLayer(around, own, whole, index, context, dropped, ulysses, _Alone()).install()
    else:
        around.core_attention.forward = ElasticAttention(own, whole, index, dropped, ulysses)
    # What is left of Megatron's context parallelism in a layer: each rank would take its rows'
    # positions from the table, which here holds them already.
    around.pg_collection = copy.copy(around.pg_collection)
    around.pg_collection.cp = _Alone()
    return () if latent else (around.linear_qkv, around.linear_proj)


def _from_here_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a stage's first layer, whose input takes part in autograd.

    A frozen embedding's does not, and with it neither the graph of what is recomputed, nor that of
    K and V, whose gradients later slices return, would begin.
    """

    @wraps(forward)
    def wrapped(hidden_states: Tensor, **others: Any) -> Any:
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return forward(hidden_states=hidden_states, **others)

    return wrapped


def _of_layer(
    config: Any, number: int, core_attention: Any, attention: Attention, ranks: Any
) -> Attention:
    """``attention`` as layer ``number`` of the model has it: with its window, and with the sinks of
    the heads that this one of ``ranks`` attends to. The sinks stay ``core_attention``'s."""
    windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)
    sinks_H = getattr(core_attention, "softmax_offset", None)
    if not windowed and sinks_H is None:
        return attention
    before = config.window_size[0] if windowed else None
    if sinks_H is None:
        return attention.of_layer(before, lambda: None)
    heads = len(sinks_H) // ranks.size()
    mine = slice(ranks.rank() * heads, (ranks.rank() + 1) * heads)
    # Looked up whenever it is used: DDP gives parameters other storage after this.
    return attention.of_layer(before, lambda: core_attention.softmax_offset[mine])


def add_every_gradient(model: nn.Module) -> None:
    """Make Transformer Engine's linears add to their weights' gradients from the first on.

    They overwrite them in the backward of what they take for an iteration's first micro-batch: the
    first that runs forward. Here others run backward before it, and their share would be lost.
    """
    _set_in_modules(model, "is_first_microbatch", False)


def fuse_weight_gradients(model: nn.Module) -> None:
    """Make Transformer Engine's linears add their weights' gradients to ``main_grad`` in the
    product that makes them: a gradient in bf16 is neither written nor read again, nor held.

    They are built without, as Megatron's output layer has one flag with them and would ask for
    apex. DDP is told of each parameter whether its gradient has been added.
    """
    _set_in_modules(model, "fuse_wgrad_accumulation", True)


def _set_in_modules(model: nn.Module, attribute: str, value: bool) -> None:
    """Set ``attribute`` in every module that has it."""
    for module in model.modules():
        if hasattr(module, attribute):
            setattr(module, attribute, value)


def _state_of(arguments: dict[str, Any]) -> ChunkState | None:
    params = arguments.get("packed_seq_params")
    return params.state if isinstance(params, ChunkParams) else None


def _checkpoint(distribute: bool, function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    return tensor_parallel.checkpoint(function, bool(distribute), tensor)
