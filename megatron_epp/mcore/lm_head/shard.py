"""Megatron's output layer with vocabulary parallelism.

With P stages, tensor-parallel rank i of stage s has shard i * P + s of the vocabulary rows. The
shards of rank i on all stages are together the rows of rank i on Megatron's last stage. In
checkpoints, the weight has Megatron's key and smaller shards. Therefore, a checkpoint can be loaded
and saved with any number of stages and ranks.

With tied embeddings, rank i of stage 0 has its full embedding, as in Megatron, and the shard of
stage 0 is a part of this embedding. Shards of other stages are copies of its rows (tied.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_epp.layers.lm_head.vocabulary import (
    OutputWeightShard,
    Statistics,
    statistics,
    weight_gradients,
)
from megatron_epp.mcore.lm_head.fused_head import rows_at_once


class VocabularyShard(nn.Module):
    """Shard of the output layer's vocabulary rows, in place of ``output_layer`` on every stage.

    H runs in the forward of this module, so that the pre-forward hook of overlapped parameter
    gathering runs for the weight. ``weight`` is a parameter of this module. On stage 0 with tied
    embeddings, ``weight`` is None, and the shard is the first rows of the embedding ``of``.

    Args:
        weight_VH: [vocabulary rows, hidden size] rows of this shard; None with tied embeddings on
            stage 0.
        index: Index of the shard.
        shards: Number of shards: stages times tensor-parallel ranks.
        tp: Tensor-parallel group.
        scattered: Whether sequence parallelism shards the hidden states over ``tp``.
        of: Weight of the embedding on stage 0 with tied embeddings; else None.
        place: Pipeline rank of every stage; empty if stage i is on rank i.
    """

    def __init__(
        self,
        weight_VH: Parameter | None,
        index: int,
        shards: int,
        tp: Any,
        scattered: bool,
        of: Parameter | None = None,
        place: tuple[int, ...] = (),
    ):
        super().__init__()
        assert (weight_VH is None) == (of is not None)
        self.weight = weight_VH
        # In a tuple, so that it is not registered as a parameter of this module.
        self._of: tuple[Parameter, ...] = () if of is None else (of,)
        self.index, self.shards, self.place = index, shards, place
        self.tp_group, self.scattered = tp, scattered
        # Counts the bytes of logits in the current iteration.
        self.hold: Callable[[Tensor], Any] = id
        self._register_load_state_dict_pre_hook(
            lambda state, prefix, *others: state.setdefault(f"{prefix}_extra_state")
        )

    @property
    def words(self) -> OutputWeightShard:
        """This rank's rows of the weight, with the settings for computing statistics."""
        # Read at every use: DDP moves parameters to other storage.
        ranks = self.tp_group.size()
        weight_VH = self.weight.detach() if self.weight is not None else self._local(*self._of)
        stages = self.shards // ranks
        return OutputWeightShard(
            weight_VH,
            self.index * len(weight_VH),
            rows_at_once(len(weight_VH), weight_VH.is_cuda, stages),
            self.tp_group if ranks > 1 else None,
            self.scattered,
            self.hold,
        )

    def forward(self, hidden_tH: Tensor, labels_T: Tensor, gradient: bool) -> Statistics:
        """Return the statistics of the logits over this shard's vocabulary rows.

        Args:
            hidden_tH: [local rows, hidden size] Hidden states of this rank's rows.
            labels_T: [rows] Labels of the chunk.
            gradient: Whether the statistics include the softmax-weighted mean row and the label row
                of the weight.
        """
        return statistics(hidden_tH, labels_T, self.words, gradient)

    def add_gradient(
        self, hidden_tH: Tensor, labels_T: Tensor, weights_T: Tensor, lse_t: Tensor
    ) -> None:
        """Accumulate the weight gradient of a chunk (op G); run hooks of the weight once.

        Args:
            hidden_tH: [local rows, hidden size] Hidden states of this rank's rows.
            labels_T: [rows] Labels of the chunk.
            weights_T: [rows] Weight of every token's loss.
            lse_t: [local rows] Log-sum-exp of the logits over the vocabulary, for this rank's rows.
        """
        before: Tensor | None = None
        parts = weight_gradients(hidden_tH, labels_T, weights_T, lse_t, self.words)
        for part_VH in parts:
            if before is not None:
                self._add(before)
            before = part_VH
        assert before is not None, "a chunk has rows"
        # The hooks of a tied embedding run in its last B, or in the stage's last op.
        if self.weight is None:
            self._add(before)
            return
        with torch.enable_grad():
            root = _BroughtGradient.apply(self.weight, before)
        torch.autograd.backward(root, root.detach())

    def _add(self, part_VH: Tensor) -> None:
        weight = self._of[0] if self.weight is None else self.weight
        total = getattr(weight, "main_grad", None)
        if total is None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            total = weight.grad
        total[: len(part_VH)] += part_VH

    def _local(self, weight: Parameter) -> Tensor:
        """Return the shard of stage 0, the first rows of ``weight``, which has all stages' rows."""
        return weight.detach()[: len(weight) * self.tp_group.size() // self.shards]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor | ShardedObject]:
        """Return the sharded weight and an empty extra state, as Megatron's output layer does.

        The result has no weight on stage 0 with tied embeddings. A GPTModel does not save the extra
        state in checkpoints, but a HybridModel requires it.
        """
        assert not sharded_offsets, "an output layer is one of its kind"
        key, extra = f"{prefix}weight", f"{prefix}_extra_state"
        rank, stage = divmod(self.index, self.shards // self.tp_group.size())
        replica = (stage, rank, _data_rank(metadata))
        sharded: dict[str, ShardedTensor | ShardedObject]
        sharded = {extra: make_sharded_object_for_checkpoint(None, extra, replica_id=replica)}
        if self.weight is not None:
            sharded[key] = sharded_vocabulary(key, self.weight, self.index, self.shards, metadata)
        return sharded

    def get_extra_state(self) -> None:
        """Return None, as Megatron's output layer does."""

    def set_extra_state(self, state: Any) -> None:
        """Do nothing, because there is no extra state."""


def sharded_vocabulary(
    key: str,
    weight_VH: Tensor,
    index: int,
    shards: int,
    metadata: dict | None = None,
    replica: tuple[int, ...] | None = None,
) -> ShardedTensor:
    """Return shard ``index`` of a table of vocabulary rows as a ShardedTensor for checkpoints.

    Args:
        key: Key of the table in checkpoints.
        weight_VH: [vocabulary rows, hidden size] Rows of the shard.
        index: Index of the shard.
        shards: Number of shards.
        metadata: Megatron's metadata of the checkpoint.
        replica: Megatron's replica_id of this copy. None: the first copy within its data-parallel
            replica.
    """
    if replica is None:
        replica = (0, 0, _data_rank(metadata))
    return ShardedTensor.from_rank_offsets(
        key,
        weight_VH,
        (0, index, shards),
        replica_id=replica,
        allow_shape_mismatch=True,  # the vocabulary is padded to a multiple of the ranks
    )


def _data_rank(metadata: dict | None) -> int:
    group = (metadata or {}).get("dp_cp_group")
    if group is None:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
    return group.rank()


class _BroughtGradient(torch.autograd.Function):
    """Autograd function whose backward returns ``gradient_VH`` as the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Parameter, gradient_VH: Tensor) -> Tensor:
        ctx.gradient = gradient_VH
        return weight_VH.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


# Attributes of Megatron's linears and output layer (tensor_parallel/layers.py).
_OF_OUTPUT_WEIGHTS = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 1,
    "allreduce": True,
    "is_embedding_or_output_parameter": True,
}


def shard_output_layer(
    models: Mapping[int, Any], place: Sequence[int], device: torch.device
) -> None:
    """Replace the output layer by shards on this rank's stages.

    All ranks of the pipeline must call this function.

    The function copies the weights from the last stage's full output layer, or from the first
    stage's embedding if embeddings are tied.

    Args:
        models: Stage modules of this rank, by stage.
        place: Pipeline rank of every stage; empty if stage i is on rank i.
        device: Device for communication.
    """
    group, tp = mpu.get_pipeline_model_parallel_group(), mpu.get_tensor_model_parallel_group()
    place = tuple(place) or tuple(range(group.size()))
    stages, one = len(place), next(iter(models.values()))
    config, tied = one.config, one.share_embeddings_and_output_weights
    if stages - 1 in models:
        assert type(models[stages - 1].output_layer) is ColumnParallelLinear, "another output layer"
    source, full_VH = 0 if tied else stages - 1, None
    if source in models:
        full_VH = models[source].shared_embedding_or_output_weight().data
    words = one.vocab_size // (tp.size() * stages)
    where, dtype = next(one.parameters()).device, config.params_dtype
    for target in range(stages):
        part = torch.empty(words, config.hidden_size, dtype=dtype, device=device)
        if full_VH is not None:
            part.copy_(full_VH[target * words : (target + 1) * words])
        dist.broadcast(part, dist.get_process_group_ranks(group)[place[source]], group=group)
        if target not in models:
            continue
        weight = Parameter(torch.empty(part.shape, dtype=dtype, device=where))
        weight.data.copy_(part)
        shared = tied and target == 0  # part of the embedding, without a copy
        for name, value in _OF_OUTPUT_WEIGHTS.items():
            setattr(weight, name, value)
        model = models[target]
        model.output_layer = VocabularyShard(
            None if shared else weight,
            tp.rank() * stages + target,
            tp.size() * stages,
            tp,
            scattered=bool(config.sequence_parallel),
            of=model.shared_embedding_or_output_weight() if shared else None,
            place=place,
        )


def shard_of(model: Any) -> VocabularyShard | None:
    """Return this stage's shard of the output layer; None without vocabulary parallelism."""
    layer = getattr(unwrap_model(model), "output_layer", None)
    return layer if isinstance(layer, VocabularyShard) else None


@contextmanager
def full_output_layer(model: Any) -> Iterator[None]:
    """Replace the last stage's shard by an untrained full output layer in this context.

    Calibration measures the full output layer, and derives the costs of the shards. ``model`` is an
    unwrapped stage module. On other stages, and without shards, the context does nothing.
    """
    own = model.output_layer if model.post_process else None
    if not isinstance(own, VocabularyShard):
        yield
        return
    config = model.config
    full_layer = ColumnParallelLinear(
        config.hidden_size,
        model.vocab_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=not model.parallel_output,
        tp_group=own.tp_group,
    )
    if config.gradient_accumulation_fusion:
        full_layer.weight.main_grad = torch.zeros_like(full_layer.weight, dtype=torch.float32)
    weight_VH = own.words.weight_VH
    model.output_layer = full_layer.to(weight_VH.device, weight_VH.dtype)
    try:
        yield
    finally:
        model.output_layer = own
