"""Megatron's token dispatchers on chunks: freed tensors, and row counts for HybridEP.

A dispatcher references tensors of the last chunk. Their autograd graph references the input of the
layer and its gradient, which would stay allocated until the layer's next chunk.

HybridEP, a backend of the flex dispatcher, requires the same number of rows on all ranks that share
the experts. This number must be a multiple of 64. HybridEP's buffers must hold the largest number
of rows (token_dispatcher.py and fused_a2a.py in core/transformer/moe/). The other backend, DeepEP,
accepts any number of rows per rank.

The plans of an iteration determine each chunk's number of rows and the largest number. Chunk i of
each replica in lockstep is padded to the largest chunk i of these replicas. Padding rows are sent
to no expert. Buffers are allocated before the iteration, because they must not grow while the
backward still needs handles to them. For inputs that are not chunks, Megatron's own all-reduce
finds the number of rows.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from megatron_epp.ir import Plan
from megatron_epp.layers.moe.current_chunk import CurrentChunk
from megatron_epp.mcore.data.row_shard import RowShard

ALIGNMENT = 64  # rows, of HybridEP's kernels
# Attributes set by this module: on a manager, the rows of each chunk; on a buffer, its capacity.
_ROWS, _RESERVED = "epp_rows", "epp_reserved"
# Attributes with which a dispatcher or its manager references tensors of the last chunk.
_HELD = (
    "probs", "routing_map", "local_probs", "local_map", "token_probs", "token_indices",
    "dispatched_probs", "dispatched_indices", "dispatched_routing_map", "tokens_per_expert",
    "reversed_mapping_for_combine",
)  # fmt: skip


def install_exchange(experts: Any, current_chunk: CurrentChunk) -> None:
    """Patch the token dispatch of an MoE layer.

    At the end of a forward, the dispatcher frees what it references. HybridEP pads chunks to the
    row counts of :func:`reserve_rows`, so that the ranks need no all-reduce to find the number.
    """
    dispatcher = experts.token_dispatcher
    combine = dispatcher.combine_postprocess

    @wraps(combine)
    def combine_postprocess(*arguments: Any) -> Tensor:
        output = combine(*arguments)
        drop_exchanged(experts)
        return output

    dispatcher.combine_postprocess = combine_postprocess
    manager = _manager(experts)
    if manager is None or not hasattr(manager, "_padded_num_tokens"):  # only HybridEP's has it
        return
    setup = manager.setup_metadata
    known, asking = copy.copy(manager.config), copy.copy(manager.config)
    known.moe_hybridep_pad_uneven_dispatch_inputs = False
    asking.moe_hybridep_pad_uneven_dispatch_inputs = True

    @torch.compiler.disable
    def setup_metadata(routing_map: Tensor, probs: Tensor) -> None:
        state, rows = current_chunk.state, getattr(manager, _ROWS, None)
        if state is None or rows is None:
            manager.config = asking
            setup(routing_map, probs)
            return
        manager.config = known
        setup(routing_map, probs)
        manager._padded_num_tokens = rows[state.chunk]
        padding = rows[state.chunk] - len(manager.routing_map)
        for name in ("routing_map", "token_probs"):
            rows_tE = getattr(manager, name)
            empty = rows_tE.new_zeros((padding, rows_tE.shape[1]))
            setattr(manager, name, torch.cat([rows_tE, empty]))

    manager.setup_metadata = setup_metadata


def reserve_rows(layers: Sequence[Any], plans: Sequence[Plan], row_shard: RowShard) -> None:
    """Set the number of rows of every chunk in HybridEP's dispatchers, and allocate its buffers.

    All ranks that share the experts call this function before the plans run. Other dispatchers do
    not change.

    Args:
        layers: MoE layers of this rank.
        plans: Plans of all replicas in lockstep, including this rank's plan.
        row_shard: This rank's shard of the rows of a chunk.
    """
    managers = [one for one in map(_manager, layers) if hasattr(one, "_padded_num_tokens")]
    if not managers:
        return
    rows = tuple(
        _aligned(max(row_shard.message(row_shard.rows(chunk)) for chunk in chunks))
        for chunks in zip(*(plan.chunks for plan in plans), strict=True)
    )
    for manager in managers:
        setattr(manager, _ROWS, rows)
    _reserve(managers[0], 1 << (max(rows) - 1).bit_length())


def _reserve(manager: Any, rows: int) -> None:
    """Allocate HybridEP's buffers, which all layers share, for at least ``rows`` rows per rank."""
    from megatron.core.transformer.moe import fused_a2a

    config, buffer = manager.config, fused_a2a._hybrid_ep_buffer
    hidden = config.moe_latent_size or config.hidden_size
    if buffer is None:
        sms = config.moe_flex_dispatcher_num_sms
        fused_a2a.init_hybrid_ep_buffer(
            manager.group, hidden, rows, manager.num_local_experts, sms, sms,
            config.moe_hybridep_num_blocks_permute, config.moe_hybridep_num_blocks_unpermute,
            False, config.moe_hybridep_num_sms_preprocessing,
        )  # fmt: skip
        buffer = fused_a2a._hybrid_ep_buffer
    elif getattr(buffer, _RESERVED, 0) < rows:
        buffer.update_template_config(
            hidden_dim=hidden,
            num_of_tokens_per_rank=rows,
            num_local_experts=manager.num_local_experts,
        )
    setattr(buffer, _RESERVED, max(rows, getattr(buffer, _RESERVED, 0)))


def drop_exchanged(experts: Any) -> None:
    """Free the tensors of the last chunk in an MoE layer's token dispatcher."""
    for holder in filter(None, (experts.token_dispatcher, _manager(experts))):
        for name in _held(holder):
            setattr(holder, name, None)


def _held(holder: Any) -> Iterator[str]:
    return (name for name in _HELD if hasattr(holder, name))


def _manager(experts: Any) -> Any:
    return getattr(experts.token_dispatcher, "_comm_manager", None)


def _aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT
