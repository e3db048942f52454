"""Breaks the schedule of a loop on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_epp.mcore.loops.slice_stage import SliceStage
from tests.mcore.sabotage import drop_returned_gradients


def return_in_the_order_run() -> AbstractContextManager:
    """What losses report comes in the order in which micro-batches ran."""

    def in_order(self: SliceStage) -> list:
        return [item for number in sorted(self.data, reverse=True) for item in self.data[number]]

    return patch.object(SliceStage, "in_callers_order", in_order)


def forget_a_gradient() -> AbstractContextManager:
    """A document's later tokens get no gradient from the loss."""
    plain = SliceStage._loss

    def loss(self: SliceStage, number: int) -> None:
        plain(self, number)
        for gradient in self._gradients.values():
            gradient[gradient.shape[0] // 2 :] = 0

    return patch.object(SliceStage, "_loss", loss)


def lose_a_slice_for_the_loss() -> AbstractContextManager:
    """The loss of a document sees another document's first output in the place of its own."""
    plain = SliceStage._keep

    def keep(self: SliceStage, chunk: int, output: torch.Tensor) -> None:
        plain(self, chunk, output.roll(1, 1))

    return patch.object(SliceStage, "_keep", keep)


def scale_by_chunks() -> AbstractContextManager:
    """A mean over micro-batches is taken over one more than there are."""
    plain = schedules.forward_step_calc_loss

    def scaled(*arguments, **named):
        count = list(arguments)
        count[6] += 1
        return plain(*count, **named)

    return patch.object(schedules, "forward_step_calc_loss", scaled)


def meet_in_between() -> AbstractContextManager:
    """Every loss begins with a barrier that nobody planned."""
    plain = SliceStage._loss

    def loss(self: SliceStage, number: int) -> None:
        dist.barrier()
        plain(self, number)

    return patch.object(SliceStage, "_loss", loss)


# The first half have losses by micro-batch, the others by token.
WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    return_in_the_order_run,
    forget_a_gradient,
    scale_by_chunks,
    lose_a_slice_for_the_loss,
    drop_returned_gradients,
    meet_in_between,
    nullcontext,
)
_BATCHES = count()


def around(number: int) -> AbstractContextManager:
    return WAYS[next(_BATCHES)]()
