"""Ops H and G of vocabulary parallelism on a stage, and their state, which F and B also use."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_epp.ir import Plan, PlanError
from megatron_epp.layers.concatenated import concatenated
from megatron_epp.layers.lm_head.vocabulary import Statistics, WeightRows
from megatron_epp.mcore.lm_head.messages import MessageShapes
from megatron_epp.mcore.lm_head.shard import VocabularyShard, shard_of
from megatron_epp.runtime.memory_meter import Meter


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Result of the last stage's forward if H and G are separate ops.

    The class wraps the tensor ``normed_t1H`` [local rows, 1, hidden size], because Megatron would
    convert an output tensor of the last stage to float32.
    """

    normed_t1H: Tensor

    @classmethod
    def after_the_norm(
        cls, *, hidden_states: Tensor | tuple[Tensor, ...], **others: Any
    ) -> "HiddenStates":
        """Return the hidden states after the final norm.

        GPTModel calls this function as its ``output_processor``. The rows of MTP modules come after
        the rows of the decoder.
        """
        if isinstance(hidden_states, tuple):
            hidden_states = torch.cat(hidden_states)
        return cls(hidden_states)


class ShardedHead:
    """State that H, G, F and B of one stage exchange during one iteration.

    For each chunk, the following tensors are saved:

        _hidden      hidden states, for G; saved by F on the last stage and by H on other stages
        _gradient    gradient of the last stage's output, for B; saved by H
        _lse         log-sum-exp over the vocabulary, for G; saved by H on the last stage and by B
                     on other stages
        _back        the same log-sum-exp, which B sends to the previous stage; a separate entry,
                     because G and B of the last stage may run in either order
        _labels, _weights    labels and loss weights, for H and G; saved by F
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
        shard.hold = meter.hold
        self.is_last = stage == shapes.stages - 1
        self._hidden: dict[int, Any] = {}
        self._gradient: dict[int, Any] = {}
        self._labels: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._lse: dict[int, Tensor] = {}
        self._back: dict[int, Tensor] = {}
        self._kept = (
            self._hidden, self._gradient, self._labels, self._weights, self._lse, self._back,
        )  # fmt: skip

    def __len__(self) -> int:
        """Return the number of chunks with saved state."""
        return len(set().union(*self._kept))

    def clear(self) -> None:
        """Free the state of all chunks."""
        for kept in self._kept:
            kept.clear()

    def learn(self, chunk: int, labels_1T: Tensor, weights_1T: Tensor) -> None:
        """Save the labels and loss weights of a chunk during F, for the later H and G."""
        self._labels[chunk], self._weights[chunk] = map(self._in_order, (labels_1T, weights_1T))

    def _in_order(self, of_each_DT: Tensor) -> Tensor:
        """Return the values [1 + D, T], flattened in the order of all-gathered hidden states.

        The order is by tensor-parallel rank, then by prediction (1 + D), then by row.
        """
        ranks = self.shard.words.scatters
        return of_each_DT.view(len(of_each_DT), ranks, -1).transpose(0, 1).reshape(-1)

    def _of_each(self, ordered: Tensor) -> Tensor:
        """Return the values as [1 + D, T]; the inverse of :meth:`_in_order`."""
        ranks, each = self.shard.words.scatters, self.shapes.predictions
        return ordered.view(ranks, each, -1).transpose(0, 1).reshape(each, -1)

    def begin(self, chunk: int, hidden_t1H: Tensor) -> Tensor:
        """Save the last stage's hidden states, and return the message to the first stage."""
        self._hidden[chunk] = self.meter.hold(hidden_t1H)
        return self.shapes.head(chunk, 0).pack((hidden_t1H,), ())

    def head(self, chunk: int, received: Tensor) -> Tensor:
        """Run H; return the next stage's message, or on the last stage the losses [1 + D, T]."""
        alive = [self.meter.hold(received)]  # counted while this op runs
        hidden_tH, before = self._unpacked(chunk, received)
        labels_T = self._labels[chunk]
        so_far = self.shard(hidden_tH, labels_T, self.training)
        if so_far.rows is not None:
            alive += map(self.meter.hold, (so_far.rows.mean_tH, so_far.rows.label_tH))
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
        packed = layout.pack((*on, *rows), (so_far.lse_t, so_far.logit_t))
        alive.append(self.meter.hold(packed))
        return packed

    def _unpacked(self, chunk: int, received: Tensor) -> tuple[Tensor, Statistics | None]:
        layout = self.shapes.head(chunk, self.stage)
        wide, narrow = layout.unpack(received)
        if not narrow:
            return wide[0], None
        if self.is_last:
            hidden_t1H = self.meter.held(self._hidden[chunk])
            hidden_tH = hidden_t1H.view(-1, hidden_t1H.shape[-1])
        else:
            # Copied, because a view would keep the memory of the whole message.
            hidden_tH, wide = wide[0].clone(), wide[1:]
        rows = WeightRows(*wide) if self.training else None
        lse_t, logit_t = narrow
        return hidden_tH, Statistics(lse_t, logit_t, rows)

    def _finish(self, chunk: int, every: Statistics) -> Tensor:
        words, weights_T = self.shard.words, self._weights[chunk]
        losses_T = words.gathered(every.losses_t)
        if every.rows is None:
            self._forget(chunk)
        else:
            gradient_tH = every.rows.gradient(words.local(weights_T))
            self._gradient[chunk] = self.meter.hold(gradient_tH[:, None])
            self._lse[chunk] = self._back[chunk] = every.lse_t
        return self._of_each(losses_T)

    def _forget(self, chunk: int) -> None:
        del self._labels[chunk], self._weights[chunk]
        self._hidden.pop(chunk, None)

    def gradient(self, chunk: int, received: Tensor | None) -> Tensor:
        """Return the gradient of the stage's output, for B or I."""
        if self.is_last:
            return self.meter.held(self._gradient.pop(chunk))
        assert received is not None, "the next stage sends a gradient"
        (gradient_tH,), lse = self.shapes.gradient(chunk).unpack(received)
        self._lse[chunk] = self._back[chunk] = concatenated(lse)
        return gradient_tH[:, None]

    def hand_back(self, chunk: int, gradient_t1H: Tensor | None) -> Tensor | None:
        """Return the message to the previous stage: the input's gradient and the log-sum-exp.

        The result is None if there is no input gradient.
        """
        lse_t = self._back.pop(chunk)
        if gradient_t1H is None:
            return None
        lse = lse_t.chunk(self.shapes.predictions)
        return self.shapes.gradient(chunk).pack((gradient_t1H,), lse)

    def weight_gradient(self, chunk: int) -> None:
        """Run G: compute the gradient of the shard's weight for ``chunk``, and accumulate it."""
        hidden = self.meter.held(self._hidden.pop(chunk))
        self.shard.add_gradient(
            hidden.view(-1, hidden.shape[-1]),
            self._labels.pop(chunk),
            self._weights.pop(chunk),
            self._lse.pop(chunk),
        )


def head_for(
    model: Any, plan: Plan, stage: int, shapes: MessageShapes, meter: Meter
) -> ShardedHead | None:
    """Return the object that runs H and G on a stage; None without vocabulary parallelism.

    Args:
        model: The stage module.
        plan: The plan.
        stage: Index of the stage.
        shapes: Shapes of the messages.
        meter: Meter of the bytes of saved tensors.

    Raises:
        PlanError: Only one of plan and model has vocabulary parallelism.
    """
    shard = shard_of(model)
    if plan.vocabulary_parallel and shard is None:
        raise PlanError(
            "the plan has H and G, with the LM head sharded over the stages; "
            "give --epp-vocab-parallel on"
        )
    if shard is None:
        return None
    if not plan.vocabulary_parallel:
        raise PlanError(
            "the LM head is sharded over the stages, and the plan has no H and G; "
            "give --epp-vocab-parallel off"
        )
    return ShardedHead(shard, stage, shapes, not plan.forward_only, meter)
