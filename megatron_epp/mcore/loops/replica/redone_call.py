"""Repetition, by Megatron's schedule, of a call whose micro-batches were misread.

The readers of a framework's micro-batches may be wrong for another version of the framework. If a
stage's output then has another shape than expected, the job does not end. Every rank of the replica
restores the state before the call, and Megatron's schedule runs this call and all later calls.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.mcore.model.rng import random_states, restore_random_states


class WrongShape(ValueError):
    """Error: the output of a stage has another shape than the micro-batch's entries imply."""

    def __init__(self, chunk: int, expected: tuple[int, ...], came: tuple[int, ...]):
        """Create the error for the micro-batch ``chunk`` whose output has shape ``came``."""
        self.chunk, self.expected, self.came = chunk, expected, came
        super().__init__(
            f"micro-batch {chunk}: the model's output has shape {came}, {expected} was told "
            "beforehand; install_schedule(lengths=...) must tell the rows that all ranks of the "
            "stage compute, padding included"
        )


class MisreadCall(Exception):
    """Error: a shape was misread, so Megatron's schedule must repeat the call."""


class CallState:
    """State that a call of ``models`` changes: random states, buffers, gradients.

    Gradients that are not zero when the call begins are copied to host memory. Gradients that are
    zero, as after an optimizer step, need no copy.
    """

    def __init__(self, models: Sequence[Any], training: bool):
        """Save the state; save gradients only if ``training``."""
        self._random = random_states()
        # named_buffers, because ``buffers`` of Megatron's DDP is its list of gradient buffers.
        named = [buffer for model in models for _, buffer in model.named_buffers()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in named]
        parameters = [p for model in models for p in model.parameters()] if training else []
        self._gradients = [
            (parameter, name, getattr(parameter, name))
            for parameter in parameters
            for name in ("grad", "main_grad")
            if hasattr(parameter, name)
        ]
        present = [gradient for *_, gradient in self._gradients if gradient is not None]
        filled = torch.stack([one.any() for one in present]).tolist() if present else []
        self._copies = {
            id(gradient): gradient.detach().to("cpu", copy=True)
            for gradient, is_filled in zip(present, filled, strict=True)
            if is_filled
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore random states, buffers and gradients to their values before the call."""
        restore_random_states(self._random)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for parameter, name, gradient in self._gradients:
            setattr(parameter, name, gradient)
            if gradient is not None and id(gradient) in self._copies:
                gradient.copy_(self._copies[id(gradient)])
            elif gradient is not None:
                gradient.zero_()


class ShapeVote:
    """Vote of a replica's ranks, by all-reduce, on whether all outputs had the expected shapes.

    Each rank starts the all-reduce after its last forward, and waits for the result before its last
    backward. The last backward starts the reduction of gradients over replicas, which cannot be
    undone. No rank blocks: the last backward of a stage depends on all forwards of all stages.

    Attributes:
        misread: Whether an output of this rank has another shape than expected; set by the caller.
    """

    def __init__(self, control: dist.ProcessGroup, forwards: int):
        """Create a vote over the CPU group ``control``; each rank runs ``forwards`` forwards."""
        self._control, self._left = control, forwards
        self._work: Any = None
        self._wrong = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.misread = False

    def forward_done(self) -> None:
        """Count a forward of this rank; after the last one, start the all-reduce of the vote."""
        self._left -= 1
        if self._left == 0:
            self.cast()

    def cast(self) -> None:
        """Start the all-reduce of this rank's vote over the replica, without waiting for it.

        Call this method after the rank's last forward, or when no more forwards will run. Repeated
        calls do nothing.
        """
        if self._work is None:
            self._wrong.fill_(int(self.misread))
            self._work = dist.all_reduce(
                self._wrong, dist.ReduceOp.MAX, group=self._control, async_op=True
            )

    @property
    def passed(self) -> bool:
        """Whether every rank's outputs had the expected shapes; waits for the all-reduce."""
        self.cast()
        self._work.wait()
        return not int(self._wrong)
