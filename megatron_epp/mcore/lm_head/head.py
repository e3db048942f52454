"""H and G of a stage, as the executor runs them, and what they need of its F and B."""

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
    """Result of the last stage's forward where H and G are ops of their own: no tensor, as
    Megatron makes a last stage's tensors float32."""

    normed_t1H: Tensor

    @classmethod
    def after_the_norm(
        cls, *, hidden_states: Tensor | tuple[Tensor, ...], **others: Any
    ) -> "HiddenStates":
        """An ``output_processor`` of GPTModel.forward; depths' rows stand behind the decoder's."""
        if isinstance(hidden_states, tuple):
            hidden_states = torch.cat(hidden_states)
        return cls(hidden_states)


class ShardedHead:
    """State that H, G, F and B of one stage exchange during one iteration.

    hidden     from F on the last stage, from H on the others, until G
    gradient   of the last stage's output: from H until B
    lse        of all words: on the last stage from H on, on the others from B on, until G; and
               until B, which hands it ``back``. On the last stage either may run first
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
        """Chunks of which something is kept."""
        return len(set().union(*self._kept))

    def clear(self) -> None:
        for kept in self._kept:
            kept.clear()

    def learn(self, chunk: int, labels_1T: Tensor, weights_1T: Tensor) -> None:
        """F: what H and G must know of the chunk's rows; ``weights``: of their losses."""
        self._labels[chunk], self._weights[chunk] = map(self._in_order, (labels_1T, weights_1T))

    def _in_order(self, of_each_DT: Tensor) -> Tensor:
        """[1 + D, T] of the tokens that are predicted of each row in the order of hidden states
        that tensor-parallel ranks gather, each of which has its rows of all: [(1 + D) T]."""
        ranks = self.shard.words.scatters
        return of_each_DT.view(len(of_each_DT), ranks, -1).transpose(0, 1).reshape(-1)

    def _of_each(self, ordered: Tensor) -> Tensor:
        """:meth:`_in_order` undone."""
        ranks, each = self.shard.words.scatters, self.shapes.predictions
        return ordered.view(ranks, each, -1).transpose(0, 1).reshape(each, -1)

    def begin(self, chunk: int, hidden_t1H: Tensor) -> Tensor:
        """F of the last stage: what goes to the first."""
        self._hidden[chunk] = self.meter.hold(hidden_t1H)
        return self.shapes.head(chunk, 0).pack((hidden_t1H,), ())

    def head(self, chunk: int, received: Tensor) -> Tensor:
        """H: what goes to the next stage; on the last the losses [1 + D, T]."""
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
            # A copy: a part of the message would keep all of it.
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
        """B or I: the gradient of the stage's output."""
        if self.is_last:
            return self.meter.held(self._gradient.pop(chunk))
        assert received is not None, "the next stage sends a gradient"
        (gradient_tH,), lse = self.shapes.gradient(chunk).unpack(received)
        self._lse[chunk] = self._back[chunk] = concatenated(lse)
        return gradient_tH[:, None]

    def hand_back(self, chunk: int, gradient_t1H: Tensor | None) -> Tensor | None:
        """Message to the stage before: the gradient of its output, and what its G must know."""
        lse_t = self._back.pop(chunk)
        if gradient_t1H is None:
            return None
        lse = lse_t.chunk(self.shapes.predictions)
        return self.shapes.gradient(chunk).pack((gradient_t1H,), lse)

    def weight_gradient(self, chunk: int) -> None:
        """G."""
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
    """Runner of H and G of ``plan``; None where it has none. PlanError: its output layer does not
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
    return ShardedHead(shard, stage, shapes, not plan.forward_only, meter)
