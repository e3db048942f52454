"""Shapes of messages between stages, with and without vocabulary parallelism."""

from collections.abc import Callable
from functools import partial

import torch

from megatron_epp.ir import Message, Payload, Plan
from megatron_epp.layers.lm_head.vocabulary import Packing


class MessageShapes:
    """Shapes of the messages of ``plan``; ``rows`` gives the rows of a chunk that this rank sends.

    With vocabulary parallelism, a gradient also carries every row's log-sum-exp over the
    vocabulary, and there are messages of H:

        to stage 0            the last stage's hidden states
        to stages between     the same, mean and label rows of the weight, two statistics
        to the last stage     mean and label rows of the weight, two statistics

    Without training they have no rows of the weight. With several ``predictions`` per row (MTP),
    messages of H are larger by this factor, and a gradient carries as many log-sum-exps.
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
        """Return the shape of ``message``."""
        if message.payload is Payload.ACTIVATION or not self.vocabulary_parallel:
            return self.rows(message.chunk), 1, self.hidden
        if message.payload is Payload.GRADIENT:
            return (self.gradient(message.chunk).elements,)
        return (self.head(message.chunk, message.target).elements,)

    def gradient(self, chunk: int) -> Packing:
        """Return the packing of a gradient of ``chunk``."""
        return Packing(self.rows(chunk), self.hidden, 1, self.predictions, self.dtype)

    def head(self, chunk: int, target: int) -> Packing:
        """Return the packing of H's message of ``chunk`` to the stage ``target``."""
        packing = partial(Packing, self.predictions * self.rows(chunk), self.hidden)
        if target == 0:
            return packing(1, 0, self.dtype)
        hidden = int(target < self.stages - 1)
        return packing(hidden + 2 * self.training, 2, self.dtype)
