"""Embedding tied to an output layer with vocabulary parallelism.

Stage 0 has Megatron's embedding, which contains stage 0's shard of the output layer. Each other
stage has a copy of the rows of its shard. Once per iteration, the gradients of both copies of a row
are set to their sum, so the optimizer changes both copies equally. Megatron does the same with its
two copies on the first and the last stage. The gradient norm and checkpoints include only the
embedding. In checkpoints, the embedding is divided in the same way as the shards, because all
copies of a tensor must be sharded equally.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Parameter

from megatron_epp.mcore.lm_head.shard import VocabularyShard, shard_of, sharded_vocabulary


def tie(models: Sequence[Any], device: torch.device) -> None:
    """Tie the output layer's shards to the embedding, for models with tied embeddings.

    All ranks of the pipeline must call this function. ``models`` are this rank's unwrapped stage
    modules.

    Raises:
        ValueError: Megatron would also exchange the gradients of the tied weights.
    """
    if not models[0].share_embeddings_and_output_weights:
        return
    # Only the ranks of an embedding group know its size; the all-reduce makes all ranks refuse.
    own = mpu.get_embedding_group(check_initialized=False)
    exchanged = torch.tensor(own is not None and own.size() > 1, device=device).int()
    dist.all_reduce(exchanged, group=mpu.get_pipeline_model_parallel_group())
    if exchanged.item():
        raise ValueError(
            "--epp-vocab-parallel on: embeddings are tied, and Megatron would exchange their "
            "gradients between the first and the last stage; give pretrain() "
            "get_embedding_ranks=megatron_epp.mcore.job.megatron_gpt.embedding_ranks, or leave the "
            "flag out"
        )
    for model in models:
        weight = model.output_layer.weight
        model.tie_embeddings_and_output_weights_state_dict = partial(_tie_state_dict, model)
        if weight is None:
            continue
        weight.shared = True  # the gradient norm excludes it, because it includes the embedding
        # With the distributed optimizer, the weight has its own bucket, like the embedding.
        weight.shared_embedding = True


def _tie_state_dict(
    model: Any, state: dict[str, Any], output_key: str, embedding_key: str, metadata: dict
) -> None:
    """Set the tied weights in ``state``; replaces tie_embeddings_and_output_weights_state_dict."""
    shard: VocabularyShard = model.output_layer
    group = metadata.get("dp_cp_group")
    if group is None:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
    if not model.pre_process:
        assert shard.weight is not None, "the first stage's alone lies in the embedding"
        state[output_key] = sharded_vocabulary(
            embedding_key, shard.weight, shard.index, shard.shards, replica=(1, 0, group.rank())
        )
        return
    count = len(shard.place)

    def build(key: str, weight: Tensor, replica: Any, flattened: slice | None) -> list:
        assert flattened is None, "optimizer states of a part of a tensor"
        return [
            sharded_vocabulary(key, part, shard.index + stage, shard.shards, replica=replica)
            for stage, part in enumerate(weight.chunk(count))
        ]

    def merge(parts: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat(parts)

    state[embedding_key] = ShardedTensorFactory(
        embedding_key,
        model.embedding.word_embeddings.weight,
        build,
        merge,
        (0, 0, group.rank()),
    )


def add_up_tied_gradients(models: Sequence[Any]) -> None:
    """Set the gradients of both copies of every row to their sum.

    All ranks of the pipeline must call this function once per iteration, after DDP's gradient
    reduction. ``models`` are this rank's stage modules, wrapped by DDP. Without tied shards, the
    function does nothing.
    """
    shard = shard_of(models[0])
    if shard is None or not unwrap_model(models[0]).share_embeddings_and_output_weights:
        return
    group, place = mpu.get_pipeline_model_parallel_group(), shard.place
    own: list[Tensor] = []  # gradients of this rank's stages
    total: Tensor | None = None
    for model in models:
        weight = shard_of(model).weight  # type: ignore[union-attr]
        if weight is not None:
            own.append(_full_gradient(model, weight))
            continue
        total = _full_gradient(model, unwrap_model(model).embedding.word_embeddings.weight)
        # Placeholder for stage 0, whose gradient is already in the total.
        own.append(torch.empty_like(total.chunk(len(place))[0]))
    rounds = max(place.count(rank) for rank in range(group.size()))
    own += [torch.empty_like(own[0])] * (rounds - len(own))  # other ranks have more stages
    for number, gradient in enumerate(own):
        if total is None:
            dist.gather(gradient, group=group, group_dst=place[0])
            continue
        parts = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.gather(gradient, parts, group=group, group_dst=place[0])
        for stage, rows in _vocabulary_rows_of(total, place, number).items():
            if stage > 0:
                rows += parts[place[stage]]
    for number, gradient in enumerate(own):
        if total is None:
            dist.scatter(gradient, group=group, group_src=place[0])
            continue
        parts = [torch.empty_like(gradient) for _ in range(group.size())]
        for stage, rows in _vocabulary_rows_of(total, place, number).items():
            parts[place[stage]] = rows.contiguous()
        dist.scatter(gradient, parts, group=group, group_src=place[0])


def _vocabulary_rows_of(total: Tensor, place: Sequence[int], number: int) -> dict[int, Tensor]:
    """Return stage -> its rows of ``total``, for each pipeline rank's stage of index ``number``."""
    parts, seen, rows_of = total.chunk(len(place)), [0] * (1 + max(place)), {}
    for stage, rank in enumerate(place):
        if seen[rank] == number:
            rows_of[stage] = parts[stage]
        seen[rank] += 1
    return rows_of


def _full_gradient(model: Any, weight: Parameter) -> Tensor:
    """Return the full ``weight.main_grad`` on every replica. Collective over the replicas.

    With the distributed optimizer, each replica has only a shard of it after the reduction, and the
    function all-gathers the shards.
    """
    if model.ddp_config.use_distributed_optimizer:
        buckets = model.param_to_bucket_group[weight]
        replicas = buckets.intra_distributed_optimizer_instance_group
        for bucket in buckets.buckets:
            if weight in bucket.params and replicas.size() > 1:
                local = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, local, group=replicas)
    total = getattr(weight, "main_grad", None)
    assert total is not None, "DDP gives every weight its gradient"
    return total
