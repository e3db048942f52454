"""Both ends of the model on one rank, each with a copy of the embedding: they stay alike.

Megatron gives the first stage the embedding and the last a copy, for tied output layers and for
layers that predict further tokens, and has the two ranks exchange their gradients. Where both ends
lie on one rank its group has one member and exchanges nothing; here the copies get one start and,
once per iteration, the sum of both gradients. The gradient norm counts one of them, as ever.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron_epp.mcore.lm_head.shard import shard_of


def tie_embeddings(stages: Mapping[int, Any], count: int) -> None:
    """Give the last of ``count`` stages the first one's embedding, if this rank has both and they
    share it; ``stages``: its own, not wrapped yet. ValueError: a third copy lies in the output
    layer's shards."""
    copies = _copies([stages[stage] for stage in (0, count - 1) if stage in stages])
    if copies is None:
        return
    first, last = copies
    if shard_of(stages[0]) is not None and stages[0].share_embeddings_and_output_weights:
        raise ValueError(
            "--epp-vocab-parallel on: embeddings are tied, and layers that predict further tokens "
            "have a copy on the same rank; place the first stage on another rank, or leave the "
            "flag out"
        )
    with torch.no_grad():
        last.data.copy_(first.data)


def add_up_embedding_gradients(models: Sequence[Any]) -> None:
    """Give both copies of a shared embedding the sum of their gradients; ``models``: this rank's
    parts, wrapped by DDP. With the distributed optimizer each copy fills buckets of its own, so
    that a replica has the same part of both."""
    copies = _copies([unwrap_model(models[0]), unwrap_model(models[-1])] if models[1:] else [])
    if copies is None:
        return
    first, last = (weight.main_grad for weight in copies)
    first += last
    last.copy_(first)


def _copies(ends: Sequence[Any]) -> tuple[Any, Any] | None:
    """The embedding of the first stage and its copy on the last; None where ``ends`` are not the
    model's, or share none."""
    if len(ends) < 2 or not (ends[0].pre_process and ends[1].post_process):
        return None
    first = ends[0]
    mtp_layers = getattr(first.config, "mtp_num_layers", None)
    sharded = shard_of(first) is not None  # lm_head/tied.py adds up its words
    if not (mtp_layers or (first.share_embeddings_and_output_weights and not sharded)):
        return None
    return tuple(end.shared_embedding_or_output_weight() for end in ends)  # type: ignore[return-value]
