"""An embedding that is tied to an output layer whose words lie over the stages.

Stage 0 has the embedding as Megatron gives it, which is its shard of the output layer, too; each
other stage has a copy of the words of its shard. Once per iteration both copies of a word get the
sum of their gradients, so that they step alike, as Megatron's two copies on the first and the last
stage do. The gradient norm counts the embedding only, and a checkpoint has it only: in as many
parts as there are shards, since all copies of a tensor must be cut alike.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Parameter

from megatron_epp.mcore.model.vocabulary.shard import VocabularyShard, shard_of, sharded_words


def tie(model: Any, device: torch.device) -> None:
    """``model``, which is not wrapped yet, has a shard that is a copy of its embedding's words, if
    the two are tied. Collective over the pipeline. ValueError: somebody else exchanges their
    gradients."""
    if not model.share_embeddings_and_output_weights:
        return
    # Only the ranks of such a group know of it; all refuse alike.
    own = mpu.get_embedding_group(check_initialized=False)
    exchanged = torch.tensor(own is not None and own.size() > 1, device=device).int()
    dist.all_reduce(exchanged, group=mpu.get_pipeline_model_parallel_group())
    if exchanged.item():
        raise ValueError(
            "--epp-vocab-parallel on: embeddings are tied, and Megatron would exchange their "
            "gradients between the first and the last stage; give pretrain() "
            "get_embedding_ranks=megatron_epp.mcore.megatron_gpt.embedding_ranks, or leave the "
            "flag out"
        )
    weight = model.output_layer.weight
    model.tie_embeddings_and_output_weights_state_dict = partial(_tie_state_dict, model)
    if weight is None:
        return
    weight.shared = True  # the norm counts the embedding
    # In a bucket of its own under the distributed optimizer, as the embedding is.
    weight.shared_embedding = True


def _tie_state_dict(
    model: Any, state: dict[str, Any], output_key: str, embedding_key: str, metadata: dict
) -> None:
    """Replaces LanguageModule's, for every stage."""
    shard: VocabularyShard = model.output_layer
    group = metadata.get("dp_cp_group")
    if group is None:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
    if not model.pre_process:
        assert shard.weight is not None, "the first stage's alone lies in the embedding"
        state[output_key] = sharded_words(
            embedding_key, shard.weight, shard.index, shard.shards, replica=(1, 0, group.rank())
        )
        return
    count = mpu.get_pipeline_model_parallel_group().size()

    def build(key: str, weight: Tensor, replica: Any, flattened: slice | None) -> list:
        assert flattened is None, "optimizer states of a part of a tensor"
        return [
            sharded_words(key, part, shard.index + stage, shard.shards, replica=replica)
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


def add_up_tied_gradients(model: Any) -> None:
    """Give both copies of every word the sum of their gradients. Collective over the pipeline,
    once per iteration, when those over the replicas are done. ``model`` is wrapped by DDP."""
    shard = shard_of(model)
    if shard is None or not unwrap_model(model).share_embeddings_and_output_weights:
        return
    group = mpu.get_pipeline_model_parallel_group()
    if shard.weight is not None:
        own = _whole_gradient(model, shard.weight)
        dist.gather(own, group=group, group_dst=0)
        dist.scatter(own, group=group, group_src=0)
        return
    total = _whole_gradient(model, unwrap_model(model).embedding.word_embeddings.weight)
    first, *others = total.chunk(group.size())
    nothing = torch.empty_like(first)  # of stage 0 itself, which has added up its own
    parts = [nothing, *map(torch.empty_like, others)]
    dist.gather(nothing, parts, group=group, group_dst=0)
    for mine, part in zip(others, parts[1:], strict=True):
        mine += part
    dist.scatter(
        nothing, [part.contiguous() for part in (first, *others)], group=group, group_src=0
    )


def _whole_gradient(model: Any, weight: Parameter) -> Tensor:
    """``weight.main_grad``, on every replica all of it: the distributed optimizer's reduction
    leaves each a part. Collective over the replicas."""
    if model.ddp_config.use_distributed_optimizer:
        buckets = model.param_to_bucket_group[weight]
        replicas = buckets.intra_distributed_optimizer_instance_group
        for bucket in buckets.buckets:
            if weight in bucket.params and replicas.size() > 1:
                mine = bucket.grad_data.view(replicas.size(), -1)[replicas.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=replicas)
    total = getattr(weight, "main_grad", None)
    assert total is not None, "DDP gives every weight its gradient"
    return total
