"""Megatron's output layer with its words over the stages, and what a stage's H and G do with it.

Shard i * P + s of the words lies on stage s of P, tensor-parallel rank i: together the stages hold
of rank i what Megatron's last stage holds. It is the layer's weight that a checkpoint knows under
the same key, cut finer, so checkpoints load and save whatever the stages and ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_epp.ir import Message, Payload, Plan, PlanError
from megatron_epp.layers.vocabulary import (
    Layout,
    Rows,
    Statistics,
    Words,
    statistics,
    weight_gradients,
)
from megatron_epp.mcore.model.early_head import rows_at_once
from megatron_epp.runtime.memory_meter import Meter


class VocabularyShard(nn.Module):
    """Some words of the output layer, in its place on every stage: ``output_layer``.

    Its forward is H's arithmetic, so that whoever waits for a module's weights waits for these.
    """

    def __init__(self, weight_VH: Parameter, index: int, shards: int, tp: Any, scattered: bool):
        super().__init__()
        self.weight = weight_VH
        self.index, self.shards = index, shards
        self.tp_group, self.scattered = tp, scattered

    @property
    def words(self) -> Words:
        # Looked up whenever it is used: DDP gives parameters other storage.
        return Words(
            self.weight.detach(),
            self.index * len(self.weight),
            rows_at_once(len(self.weight), self.weight.is_cuda),
            self.tp_group if self.tp_group.size() > 1 else None,
            self.scattered,
        )

    def forward(self, hidden_tH: Tensor, labels_T: Tensor, gradient: bool) -> Statistics:
        return statistics(hidden_tH, labels_T, self.words, gradient)

    def add_gradient(
        self, hidden_tH: Tensor, labels_T: Tensor, weights_T: Tensor, lse_t: Tensor
    ) -> None:
        """G: what a chunk adds to the weight's gradient; hooks on it fire once."""
        before: Tensor | None = None
        parts = weight_gradients(hidden_tH, labels_T, weights_T, lse_t, self.words)
        for part_VH in parts:
            if before is not None:
                self._add(before)
            before = part_VH
        assert before is not None, "a chunk has rows"
        with torch.enable_grad():
            root = _Given.apply(self.weight, before)
        torch.autograd.backward(root, root.detach())

    def _add(self, part_VH: Tensor) -> None:
        if (total := getattr(self.weight, "main_grad", None)) is not None:
            total.add_(part_VH)
        elif self.weight.grad is None:
            self.weight.grad = part_VH
        else:
            self.weight.grad += part_VH

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensor]:
        assert not sharded_offsets, "an output layer is one of its kind"
        group = (metadata or {}).get("dp_cp_group")
        group = mpu.get_data_parallel_group(with_context_parallel=True) if group is None else group
        key = f"{prefix}weight"
        return {
            key: ShardedTensor.from_rank_offsets(
                key,
                self.weight,
                (0, self.index, self.shards),
                replica_id=(0, 0, group.rank()),
                allow_shape_mismatch=True,  # words are padded to a multiple of the ranks
            )
        }


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the last stage's forward ends with where H and G are ops of their own: no tensor, as
    Megatron makes a last stage's tensors float32."""

    behind_norm_t1H: Tensor

    @classmethod
    def behind_the_norm(cls, *, hidden_states: Tensor, **others: Any) -> "HiddenStates":
        """An ``output_processor`` of GPTModel.forward."""
        return cls(hidden_states)


class _Given(torch.autograd.Function):
    """A root that leads to a weight and brings it a gradient."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Parameter, gradient_VH: Tensor) -> Tensor:
        ctx.gradient = gradient_VH
        return weight_VH.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor):
        return ctx.gradient, None


def spread_output_layer(model: Any, device: torch.device) -> None:
    """Give this stage its words in the place of the last stage's whole output layer, which is where
    their weights come from. Collective over the pipeline; ``device``: where it speaks.

    PlanError, ValueError: nothing; what cannot be spread was refused by its flags.
    """
    group = mpu.get_pipeline_model_parallel_group()
    stages, stage = group.size(), group.rank()
    tp = mpu.get_tensor_model_parallel_group()
    whole_VH, config = None, model.config
    if stage == stages - 1:
        assert type(model.output_layer) is ColumnParallelLinear, "another output layer"
        whole_VH = model.output_layer.weight
    words = model.vocab_size // (tp.size() * stages)
    like = next(model.parameters())
    weight = Parameter(torch.empty(words, config.hidden_size, dtype=like.dtype, device=like.device))
    last = dist.get_process_group_ranks(group)[-1]
    for target in range(stages):
        part = torch.empty(weight.shape, dtype=like.dtype, device=device)
        if whole_VH is not None:
            part.copy_(whole_VH.data[target * words : (target + 1) * words])
        dist.broadcast(part, last, group=group)
        if target == stage:
            weight.data.copy_(part)
    # As Megatron's linears and output layers have it (tensor_parallel/layers.py).
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
    weight.allreduce = True
    weight.is_embedding_or_output_parameter = True
    model.output_layer = VocabularyShard(
        weight,
        tp.rank() * stages + stage,
        tp.size() * stages,
        tp,
        scattered=bool(config.sequence_parallel),
    )


def shard_of(model: Any) -> VocabularyShard | None:
    """This stage's words, where the output layer is spread over the stages."""
    found = getattr(unwrap_model(model), "output_layer", None)
    return found if isinstance(found, VocabularyShard) else None


def head_for(
    model: Any, plan: Plan, stage: int, shapes: "MessageShapes", meter: Meter
) -> "SpreadHead | None":
    """What runs H and G of ``plan``; None where it has none. PlanError: its output layer does not
    lie as the model's does."""
    shard = shard_of(model)
    if plan.vocabulary_parallel and shard is None:
        raise PlanError(
            "the plan has H and G, whose output layer lies over the stages; "
            "give --epp-vocab-parallel on"
        )
    if shard is None:
        return None
    if not plan.vocabulary_parallel:
        raise PlanError(
            "the output layer lies over the stages, and the plan has no H and G; "
            "give --epp-vocab-parallel off"
        )
    return SpreadHead(shard, stage, shapes, not plan.forward_only, meter)


# ------------------------------------------------------------------ messages


class MessageShapes:
    """What a message of ``plan`` holds of the ``rows`` of a chunk that this rank hands on.

    Where the output layer lies over the stages, a gradient brings every row's logarithm of the sum
    over all words along, and there are messages of H:

        onto stage 0         the last stage's hidden states
        onto stages between  the same, mean and label's rows, two statistics
        onto the last stage  mean and label's rows, two statistics

    without rows of the weight where nothing is trained.
    """

    def __init__(self, plan: Plan, rows: Callable[[int], int], hidden: int, dtype: torch.dtype):
        self.rows, self.hidden, self.dtype = rows, hidden, dtype
        self.stages, self.spread = plan.stages, plan.vocabulary_parallel
        self.training = not plan.forward_only

    def __call__(self, message: Message) -> tuple[int, ...]:
        if message.payload is Payload.ACTIVATION or not self.spread:
            return self.rows(message.chunk), 1, self.hidden
        if message.payload is Payload.GRADIENT:
            return (self.gradient(message.chunk).elements,)
        return (self.head(message.chunk, message.target).elements,)

    def gradient(self, chunk: int) -> Layout:
        return Layout(self.rows(chunk), self.hidden, 1, 1, self.dtype)

    def head(self, chunk: int, target: int) -> Layout:
        made = partial(Layout, self.rows(chunk), self.hidden)
        if target == 0:
            return made(1, 0, self.dtype)
        hidden = int(target < self.stages - 1)
        return made(hidden + 2 * self.training, 2, self.dtype)


# ------------------------------------------------------------------ a stage's H and G


class SpreadHead:
    """What H and G of one stage need of each other, of F and of B, for one iteration.

    hidden     from F on the last stage, from H on the others, until G
    gradient   of the last stage's output: from H until B
    lse        of all words: on the last stage from H on, on the others from B on, until G
    """

    def __init__(
        self,
        shard: VocabularyShard,
        stage: int,
        shapes: MessageShapes,
        training: bool,
        meter: Meter,
    ):
        self.shard, self.stage, self.shapes = shard, stage, shapes
        self.training, self.meter = training, meter
        self.is_last = stage == shapes.stages - 1
        self._hidden: dict[int, Any] = {}
        self._gradient: dict[int, Any] = {}
        self._labels: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._lse: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Chunks of which something is kept."""
        kept = (self._hidden, self._gradient, self._labels, self._weights, self._lse)
        return len(set().union(*kept))

    def clear(self) -> None:
        for kept in (self._hidden, self._gradient, self._labels, self._weights, self._lse):
            kept.clear()

    def learn(self, chunk: int, labels_1T: Tensor, weights_1T: Tensor) -> None:
        """F: what H and G must know of the chunk's rows; ``weights``: of their losses."""
        self._labels[chunk], self._weights[chunk] = labels_1T[0], weights_1T[0]

    def begin(self, chunk: int, hidden_t1H: Tensor) -> Tensor:
        """F of the last stage: what goes to the first."""
        self._hidden[chunk] = self.meter.hold(hidden_t1H)
        return self.shapes.head(chunk, 0).pack((hidden_t1H,), ())

    def head(self, chunk: int, received: Tensor) -> Tensor:
        """H: what goes to the next stage; on the last the losses [1, T]."""
        hidden_tH, before = self._unpacked(chunk, received)
        labels_T = self._labels[chunk]
        so_far = self.shard(hidden_tH, labels_T, self.training)
        if before is not None:
            so_far = before.merged(so_far)
        if self.is_last:
            return self._finish(chunk, so_far)
        if self.training:
            self._hidden[chunk] = self.meter.hold(hidden_tH)
        else:
            self._forget(chunk)
        layout = self.shapes.head(chunk, self.stage + 1)
        rows = () if so_far.rows is None else (so_far.rows.mean_tH, so_far.rows.label_tH)
        on = () if self.stage + 1 == self.shapes.stages - 1 else (hidden_tH,)
        return layout.pack((*on, *rows), (so_far.lse_t, so_far.logit_t))

    def _unpacked(self, chunk: int, received: Tensor) -> tuple[Tensor, Statistics | None]:
        layout = self.shapes.head(chunk, self.stage)
        wide, narrow = layout.unpack(received)
        if not narrow:
            return wide[0], None
        if self.is_last:
            hidden_t1H = self.meter.held(self._hidden[chunk])
            hidden_tH = hidden_t1H.view(-1, hidden_t1H.shape[-1])
        else:
            # A copy: a part of the message would keep all of it.
            hidden_tH, *wide = wide[0].clone(), *wide[1:]
        rows = Rows(*wide) if self.training else None
        return hidden_tH, Statistics(*narrow, rows)

    def _finish(self, chunk: int, every: Statistics) -> Tensor:
        words, weights_T = self.shard.words, self._weights[chunk]
        losses_T = words.gathered(every.losses_t)
        if every.rows is None:
            self._forget(chunk)
        else:
            gradient_tH = every.rows.gradient(words.mine(weights_T))
            self._gradient[chunk] = self.meter.hold(gradient_tH[:, None])
            self._lse[chunk] = every.lse_t
        return losses_T[None]

    def _forget(self, chunk: int) -> None:
        del self._labels[chunk], self._weights[chunk]
        self._hidden.pop(chunk, None)

    def gradient(self, chunk: int, received: Tensor | None) -> Tensor:
        """B or I: the gradient of the stage's output."""
        if self.is_last:
            return self.meter.held(self._gradient.pop(chunk))
        assert received is not None, "the next stage sends a gradient"
        (gradient_tH,), (self._lse[chunk],) = self.shapes.gradient(chunk).unpack(received)
        return gradient_tH[:, None]

    def hand_back(self, chunk: int, gradient_t1H: Tensor | None) -> Tensor | None:
        """What goes to the stage before: the gradient of its output, and what its G must know."""
        if gradient_t1H is None:
            return None
        return self.shapes.gradient(chunk).pack((gradient_t1H,), (self._lse[chunk],))

    def weight_gradient(self, chunk: int) -> None:
        """G."""
        hidden = self.meter.held(self._hidden.pop(chunk))
        self.shard.add_gradient(
            hidden.view(-1, hidden.shape[-1]),
            self._labels.pop(chunk),
            self._weights.pop(chunk),
            self._lse.pop(chunk),
        )
