"""Shapes of messages where the output layer lies over the stages, and where it does not."""

from collections.abc import Callable
from functools import partial

import torch

from megatron_epp.ir import Message, Payload, Plan
from megatron_epp.layers.lm_head.vocabulary import Packing


class MessageShapes:
    """Contents of a message of ``plan``, for the ``rows`` of a chunk that this rank hands on.

    Where the output layer lies over the stages, a gradient brings every row's logarithm of the sum
    over all words along, and there are messages of H:

        onto stage 0         the last stage's hidden states
        onto stages between  the same, mean and label's rows, two statistics
        onto the last stage  mean and label's rows, two statistics

    without rows of the weight where nothing is trained. Of each row ``predictions`` tokens are
    predicted: so many times as large are messages of H, and so many logarithms a gradient brings.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Callable[[int], int],
        hidden: int,
        dtype: torch.dtype,
        predictions: int = 1,
    ):
        self.predictions = predictions
        self.rows, self.hidden, self.dtype = rows, hidden, dtype
        self.stages, self.vocabulary_parallel = plan.stages, plan.vocabulary_parallel
        self.training = not plan.forward_only

    def __call__(self, message: Message) -> tuple[int, ...]:
        if message.payload is Payload.ACTIVATION or not self.vocabulary_parallel:
            return self.rows(message.chunk), 1, self.hidden
        if message.payload is Payload.GRADIENT:
            return (self.gradient(message.chunk).elements,)
        return (self.head(message.chunk, message.target).elements,)

    def gradient(self, chunk: int) -> Packing:
        return Packing(self.rows(chunk), self.hidden, 1, self.predictions, self.dtype)

    def head(self, chunk: int, target: int) -> Packing:
        packing = partial(Packing, self.predictions * self.rows(chunk), self.hidden)
        if target == 0:
            return packing(1, 0, self.dtype)
        hidden = int(target < self.stages - 1)
        return packing(hidden + 2 * self.training, 2, self.dtype)
