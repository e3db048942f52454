"""Faults of the schedule of a loop in slices."""

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_epp.mcore.loops.slice_stage import SliceStage
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing
from tests.mcore.faults import executor


def in_the_order_run(in_callers_order, stage: SliceStage) -> list:
    return [item for number in sorted(stage.data, reverse=True) for item in stage.data[number]]


def forget_a_gradient(loss, stage: SliceStage, number: int) -> None:
    loss(stage, number)
    for gradient in stage._gradients.values():
        gradient[gradient.shape[0] // 2 :] = 0


def lose_a_slice(keep, stage: SliceStage, chunk: int, output: torch.Tensor) -> None:
    keep(stage, chunk, output.roll(1, 1))


def scale_by_chunks(forward_step_calc_loss, *arguments, **named):
    counts = list(arguments)
    counts[6] += 1
    return forward_step_calc_loss(*counts, **named)


def meet_in_between(loss, stage: SliceStage, number: int) -> None:
    dist.barrier()
    loss(stage, number)


# The first half have losses by micro-batch, the others by token.
FAULTS: Faults = {
    "nothing": nothing,
    # What losses report comes in the order in which micro-batches ran.
    "return in the order run": fault(SliceStage, "in_callers_order", in_the_order_run),
    # A document's later tokens get no gradient from the loss.
    "forget a gradient": fault(SliceStage, "_loss", forget_a_gradient),
    # A mean over micro-batches is taken over one more than there are.
    "scale by chunks": fault(schedules, "forward_step_calc_loss", scale_by_chunks),
    # The loss of a document sees another document's first output in the place of its own.
    "lose a slice for the loss": fault(SliceStage, "_keep", lose_a_slice),
    "drop returned gradients": executor.FAULTS["drop returned gradients"],
    # Every loss begins with a barrier that nobody planned.
    "meet in between": fault(SliceStage, "_loss", meet_in_between),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
