"""Synchronisation of the embedding and its copy when one rank has the first and the last stage.

For tied output layers and MTP layers, Megatron puts the embedding on the first stage and a copy on
the last stage. Megatron all-reduces the gradients of both over the two ranks. If both stages lie on
one rank, the group has one member, and the all-reduce has no effect. This module copies the initial
value once, and sums both gradients in every iteration. As in Megatron, the gradient norm counts
only one of the copies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_epp.mcore.lm_head.shard import shard_of


def tie_embeddings(stages: Mapping[int, Any], count: int) -> None:
    """Copy the first stage's embedding to the last stage, if both are on this rank.

    If the last stage has no copy of the embedding, the function does nothing.

    Args:
        stages: This rank's stage modules by stage, not wrapped yet.
        count: Number of stages of the pipeline.

    Raises:
        ValueError: Vocabulary parallelism would require a third copy.
    """
    copies = _copies([stages[stage] for stage in (0, count - 1) if stage in stages])
    if copies is None:
        return
    first, last = copies
    if shard_of(stages[0]) is not None and stages[0].share_embeddings_and_output_weights:
        raise ValueError(
            "--epp-vocab-parallel on: embeddings are tied, and the MTP layers have a copy "
            "on the same rank; place the first stage on another rank, or leave the "
            "flag out"
        )
    with torch.no_grad():
        last.data.copy_(first.data)


def add_up_embedding_gradients(models: Sequence[Any]) -> None:
    """Set the gradients of both copies of a shared embedding to their sum, if this rank has both.

    ``models`` are this rank's stage modules, wrapped by DDP. With the distributed optimizer, a
    replica holds the same shard of both gradients, because each copy has its own gradient bucket.
    """
    copies = _copies([unwrap_model(models[0]), unwrap_model(models[-1])] if models[1:] else [])
    if copies is None or not copies[0].requires_grad:  # frozen, next to adapters
        return
    first, last = (weight.main_grad for weight in copies)
    first += last
    last.copy_(first)


def _copies(ends: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the embedding of the first stage, and its copy on the last stage.

    The result is None if ``ends`` are not the first and the last stage, or if they share no
    embedding.
    """
    if len(ends) < 2 or not (ends[0].pre_process and ends[1].post_process):
        return None
    first = ends[0]
    mtp_layers = getattr(first.config, "mtp_num_layers", None)
    sharded = shard_of(first) is not None  # lm_head/tied.py sums the gradients of sharded rows
    if not (mtp_layers or (first.share_embeddings_and_output_weights and not sharded)):
        return None
    return tuple(end.shared_embedding_or_output_weight() for end in ends)  # type: ignore[return-value]
