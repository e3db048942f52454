"""A chunk's state on its way through Megatron's layers, and what takes it out again."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from megatron_epp.layers.attention import AttendAgain, ChunkAttention
from megatron_epp.layers.chunk import ChunkState
from megatron_epp.layers.recompute import wrap_consumer, wrap_layer, wrap_mlp, wrap_norm
from megatron_epp.layers.remake import Dropped


@dataclass
class ChunkParams(PackedSeqParams):
    """Megatron hands this to every layer, in recomputation too.

    To Megatron the whole chunk is one sequence [0, T); which rows belong to which document is in
    ``state``. ``positions`` [T] are the rows' places in their documents, for the rotary embedding.
    """

    state: ChunkState | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, state: ChunkState, positions: Tensor) -> "ChunkParams":
        # On the host: the unfused rotary embedding reads it with .tolist(), which must not wait
        # for a device.
        borders = torch.tensor([0, state.tokens], dtype=torch.int32)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=state.tokens,
            max_seqlen_kv=state.tokens,
            state=state,
            positions=positions,
        )


class ElasticAttention(nn.Module):
    """In place of a layer's core attention; without parameters, so checkpoints keep their keys."""

    def __init__(self, layer: int, head_size: int, softmax_scale: float | None, dropped: Dropped):
        super().__init__()
        self.layer, self.dropped = layer, dropped
        self.scale = 1 / math.sqrt(head_size) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: ChunkParams,
        **ignored: Any,
    ) -> Tensor:
        state = packed_seq_params.state
        again = AttendAgain() if "core_attn" in self.dropped.modules else None
        out_THD = ChunkAttention.apply(
            query_THD, key_TGD, value_TGD, state, self.layer, self.scale, again
        )
        if again is not None:
            self.dropped.promise(out_THD, again)
        return out_THD.flatten(1)


class PositionedRotary(nn.Module):
    """The rotary embedding of each row's own position instead of rows 0, 1, 2, ...

    Wraps Megatron's, whose table is made once for the whole context: its cache is keyed by length.
    """

    def __init__(self, rotary: nn.Module, context: int):
        super().__init__()
        self.rotary, self.context = rotary, context
        self._positions: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> int:
        params = args[-1]
        self._positions = params.positions
        return self.context

    def forward(self, length: int, **ignored: Any) -> Tensor:
        positions, self._positions = self._positions, None
        return self.rotary(length).index_select(0, positions)


def install_in_model(model: GPTModel, context: int) -> None:
    """Make ``model`` compute chunks: its attention, its rotary embedding, its layers' recompute.

    ``context``: the most inputs of a document.
    """
    if getattr(model, "rotary_pos_emb", None) is not None:
        model.rotary_pos_emb = PositionedRotary(model.rotary_pos_emb, context)
    checkpoint = partial(_checkpoint, model.config.distribute_saved_activations)
    for index, layer in enumerate(model.decoder.layers):
        attention, dropped = layer.self_attention, Dropped()
        attention.core_attention = ElasticAttention(
            index, model.config.kv_channels, model.config.softmax_scale, dropped
        )
        layer.forward = wrap_layer(layer.forward, index, _state_of, checkpoint, dropped)
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            if any(True for _ in norm.parameters()):  # else a linear has it inside
                wrap_norm(norm, dropped)
        for consumer in (attention.linear_qkv, attention.linear_proj, layer.mlp.linear_fc1):
            wrap_consumer(consumer, dropped)
        wrap_mlp(layer.mlp, dropped)


def _state_of(arguments: dict[str, Any]) -> ChunkState | None:
    params = arguments.get("packed_seq_params")
    return params.state if isinstance(params, ChunkParams) else None


def _checkpoint(distribute: bool, function, tensor: Tensor) -> Tensor:
    return tensor_parallel.checkpoint(function, bool(distribute), tensor)
