"""Shapes of messages between stages, with and without vocabulary parallelism."""

from collections.abc import Callable
from functools import partial

import torch

from megatron_epp.ir import Message, Payload, Plan
from megatron_epp.layers.lm_head.vocabulary import Packing


class MessageShapes:
    """Shapes of the messages of ``plan``.

    ``rows(chunk)`` returns the number of rows of a chunk that this rank sends. ``hidden`` is the
    hidden size, and ``dtype`` the dtype of the messages. With vocabulary parallelism, a message
    with a gradient also contains the log-sum-exp over the vocabulary of every row. There are also
    messages of H, which contain:

        to stage 0            the last stage's hidden states
        to stages between     these hidden states, mean and label rows of the weight, two statistics
        to the last stage     mean and label rows of the weight, two statistics

    The mean row is the softmax-weighted mean of the weight's rows. The statistics are the
    log-sum-exp and the label's logit. In forward-only passes, messages of H contain no rows of the
    weight. With MTP, each row has several ``predictions``. Messages of H are then larger by the
    number of predictions, and a message with a gradient has one log-sum-exp per prediction.
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
        """Return the layout of the message with the gradient of ``chunk``."""
        return Packing(self.rows(chunk), self.hidden, 1, self.predictions, self.dtype)

    def head(self, chunk: int, target: int) -> Packing:
        """Return the layout of the message of H for ``chunk`` to the stage ``target``."""
        packing = partial(Packing, self.predictions * self.rows(chunk), self.hidden)
        if target == 0:
            return packing(1, 0, self.dtype)
        hidden = int(target < self.stages - 1)
        return packing(hidden + 2 * self.training, 2, self.dtype)
