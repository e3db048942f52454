"""Rows of chunks in HybridEP's exchange, one of the backends of Megatron's flex dispatcher.

DeepEP takes any number of rows per rank. HybridEP needs the same number, a multiple of 64, on every
rank that shares the experts, and buffers for the largest (core/transformer/moe/,
token_dispatcher.py and fused_a2a.py). A plan gives both before an iteration. Padding rows, which go
to no expert, fill a chunk up to the largest of its replicas in lockstep. Buffers are allocated at
once, because they must not grow while handles to them wait for a backward. Outside of plans,
Megatron itself asks all ranks of the group before each exchange.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_epp.ir import Plan
from megatron_epp.layers.moe.current_chunk import CurrentChunk
from megatron_epp.mcore.data.row_shard import RowShard

ALIGNMENT = 64  # rows, of HybridEP's kernels
# Our attributes: a manager's rows of each chunk, and the rows a buffer was made for.
_ROWS, _RESERVED = "epp_rows", "epp_reserved"
# What a dispatcher or its manager holds of the last chunk.
_HELD = (
    "probs", "routing_map", "local_probs", "local_map", "token_probs", "token_indices",
    "dispatched_probs", "dispatched_indices", "dispatched_routing_map", "tokens_per_expert",
    "reversed_mapping_for_combine",
)  # fmt: skip


def install_exchange(experts: Any, current_chunk: CurrentChunk) -> None:
    """Patch HybridEP's token dispatch to pad a chunk to the number of rows of :func:`reserve_rows`.

    The ranks then need no all-reduce to agree on that number. Other dispatchers do not change.
    """
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

    All ranks that share the experts call it before the plans run. Other dispatchers do not change.

    Args:
        layers: MoE layers of one rank.
        plans: Plans of all replicas that run in lockstep, including this rank's.
        row_shard: Rows of a chunk on a rank.
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
    """Make HybridEP's buffers, which all layers share, large enough for ``rows`` of each rank."""
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
