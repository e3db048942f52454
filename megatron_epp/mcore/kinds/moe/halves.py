"""MoE layers that overlap the token exchange of one half of a chunk with the experts of the other.

    exchange   dispatch 1 | dispatch 2 | combine 1 | combine 2
    compute                 experts 1    experts 2   shared experts

All rows are routed once, and the row counts of both halves are gathered and copied to the host
together. Each half has its own copy of the token dispatcher, which keeps its state in attributes.
Backward mirrors forward (layers/moe/async_exchange.py). The order of exchanges is the same on all
ranks.

A chunk is halved if the largest of the chunks that run at the same time, on all replicas that share
experts, has at least the number of tokens that :func:`set_halved_from` sets. A rank with a single
row has an empty half, and takes part in its exchanges.

For a whole chunk, ``MoELayer.forward`` remains Megatron's. For halves, this module calls the same
steps (core/transformer/moe/moe_layer.py, token_dispatcher.py), with the exchanges replaced.
"""

import math
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.moe.async_exchange import AsyncExchange
from megatron_epp.layers.moe.current_chunk import CurrentChunk
from megatron_epp.layers.recompute.outputs import DroppedOutputs

# Attribute of an MoE layer: the smallest number of tokens of a chunk that is halved.
_FROM = "epp_halved_from"


def install_halves(layer: MoELayer, current_chunk: CurrentChunk, dropped: DroppedOutputs) -> None:
    """Patch ``layer`` to run chunks in halves that :func:`set_halved_from` selects."""
    original = layer.forward

    @wraps(original)
    def forward(hidden_t1H: Tensor, *args: Any, **others: Any) -> tuple[Tensor, None]:
        if _is_halved(layer, current_chunk.state):
            return in_halves(layer, dropped, hidden_t1H), None
        return original(hidden_t1H, *args, **others)

    layer.forward = forward


def set_halved_from(layer: MoELayer, tokens: float) -> None:
    """Make ``layer`` run chunks of at least ``tokens`` in halves."""
    setattr(layer, _FROM, tokens)


def _is_halved(layer: MoELayer, state: ChunkState | None) -> bool:
    return state is not None and state.largest_tokens >= getattr(layer, _FROM, math.inf)


# ------------------------------------------------------------------ a chunk in halves


def in_halves(layer: MoELayer, dropped: DroppedOutputs, hidden_t1H: Tensor) -> Tensor:
    """Return the output [t, 1, H] of ``layer``; experts process the rows in two halves.

    Shared experts run last, during the last exchange. ``dropped`` are the outputs that the layer
    drops in the forward and recomputes in the backward.
    """
    handle = dropped.take(hidden_t1H, last=False)
    probs_tE, routing_map_tE = layer.route(hidden_t1H)
    latent = layer.config.moe_latent_size
    input_t1C = layer.fc1_latent_proj(hidden_t1H)[0] if latent else hidden_t1H
    first = len(hidden_t1H) // 2
    sizes = [first, len(hidden_t1H) - first]
    counts = _RowCounts(layer.token_dispatcher, routing_map_tE.split(sizes))
    halves = [_Half(layer.token_dispatcher, counts, number) for number in range(2)]
    parts = (each.split(sizes) for each in (input_t1C, routing_map_tE, probs_tE))
    for half, *rows in zip(halves, *parts, strict=True):
        half.start_dispatch(*half.dispatch_preprocess(*rows))
    for half in halves:
        rows_tC, counts_E, probs_t = half.dispatch_postprocess(*half.dispatch.wait())
        output_tC, _ = layer.experts(rows_tC, counts_E, probs_t)
        half.start_combine(half.combine_preprocess(output_tC))
    outputs = [halves[0].output()]
    if handle is not None:
        dropped.add(hidden_t1H, handle)
    shared_t1H = layer.shared_experts_compute(hidden_t1H)
    dropped.take(hidden_t1H)
    outputs.append(halves[1].output())
    output_t1H = torch.cat(outputs)
    if latent:
        output_t1H, _ = layer.fc2_latent_proj(output_t1H)
    return output_t1H if shared_t1H is None else output_t1H + shared_t1H


class _RowCounts:
    """Numbers of rows that ranks send to experts, for each half, on the device and on the host.

    In the tensors' shapes, r are the ranks that share the experts, h the halves, E all experts, L
    those of this rank.
    """

    def __init__(self, dispatcher: Any, routing_maps_tE: Iterable[Tensor]):
        own_hE = torch.stack([each.sum(0) for each in routing_maps_tE])
        gathered = own_hE.new_empty((dispatcher.ep_size * len(own_hE), own_hE.shape[1]))
        dist.all_gather_into_tensor(gathered, own_hE, group=dispatcher.ep_group)
        every_rhE = gathered.view(-1, *own_hE.shape)
        indices = dispatcher.local_expert_indices
        self._experts = slice(indices[0], indices[-1] + 1)
        self.local_rhL = every_rhE[:, :, self._experts].contiguous()
        self.of_experts_hL = self.local_rhL.sum(0)
        self._rank = dispatcher.ep_rank
        # Other work is issued while the counts are copied.
        self._on_host_rhE = every_rhE.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event()

    def splits(self, half: int) -> tuple[list[int], list[int]]:
        """Return the numbers of rows that this rank sends to, and receives from, each rank."""
        self._copied.synchronize()
        ranks = len(self._on_host_rhE)
        sent = self._on_host_rhE[self._rank, half].view(ranks, -1).sum(1)
        return sent.tolist(), self.on_host(half).sum(1).tolist()

    def on_host(self, half: int) -> Tensor:
        """Return the rows from each rank for each expert of this rank: [r, L]."""
        return self._on_host_rhE[:, half, self._experts].contiguous()


class _Half(MoEAlltoAllTokenDispatcher):
    """Copy of a token dispatcher for one half, whose exchanges start and end separately."""

    def __init__(self, dispatcher: Any, counts: _RowCounts, number: int):
        self.__dict__.update(vars(dispatcher))
        # Patched for whole chunks (exchange.py).
        self.__dict__.pop("combine_postprocess", None)
        self._counts, self._number = counts, number

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return the rows of each expert of this rank, in place of gathering them."""
        self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
        return self._counts.of_experts_hL[self._number]

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Read nothing back: the counts have been read back for both halves."""
        return tokens_per_expert

    def start_dispatch(self, rows_tC: Tensor, probs_t: Tensor) -> None:
        """Start to send rows and their routing weights to the experts."""
        sent, received = self._counts.splits(self._number)
        if self.config.moe_permute_fusion:
            self.num_global_tokens_per_local_expert = self._counts.local_rhL[:, self._number]
        else:
            self.num_global_tokens_per_local_expert = self._counts.on_host(self._number)
        self.dispatch = AsyncExchange(self.ep_group, sent, received)
        self.combine = AsyncExchange(self.ep_group, received, sent)
        self.dispatch.start(rows_tC, probs_t)

    def start_combine(self, output_tC: Tensor) -> None:
        """Start to send the experts' outputs back."""
        self.combine.start(output_tC)

    def output(self) -> Tensor:
        """Return the output of the half's rows, in their order."""
        return self.combine_postprocess(*self.combine.wait())
