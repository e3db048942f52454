"""A call whose micro-batches were misread, which Megatron's schedule runs once more.

The shapes of a framework's micro-batches are read by rules of its code, and code changes. A stage
that makes another shape than was read ends no job: every rank of the replica puts back what the
call has changed, and Megatron's own schedule runs it from its start, and all that follow.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.mcore.model.rng import random_states, restore_random_states


class WrongShape(ValueError):
    """A stage's output in another shape than was known beforehand."""

    def __init__(self, chunk: int, expected: tuple[int, ...], came: tuple[int, ...]):
        self.chunk, self.expected, self.came = chunk, expected, came
        super().__init__(
            f"micro-batch {chunk}: the model's output has shape {came}, {expected} was told "
            "beforehand; install_schedule(lengths=...) must tell the rows that all ranks of the "
            "stage compute, padding included"
        )


class Misread(Exception):
    """A call that every rank of the replica leaves to Megatron's schedule; says what was read."""


class CallState:
    """What a call of ``models`` changes: random states, buffers, gradients. Gradients that are zero
    when it begins, as behind an optimizer's step, cost no copy; others one in the host's memory."""

    def __init__(self, models: Sequence[Any], training: bool):
        self._random = random_states()
        # By name: Megatron's wrapper for replicas has something else that it calls buffers.
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
        """Put everything back."""
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
    """Whether all ranks of a replica made the shapes that were read. Each casts its vote behind its
    last forward, and hears of the others' before its last backward: there the reduction of
    gradients over replicas starts, which nobody can take back. Each stage's last backward comes
    behind all forwards of all stages, so nobody waits in vain.

    forwards: of this rank in the call.
    """

    def __init__(self, control: dist.ProcessGroup, forwards: int):
        self._control, self._left = control, forwards
        self._work: Any = None
        self._wrong = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.misread = False

    def forward_done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.cast()

    def cast(self) -> None:
        """Tell the others, once; behind a failure without waiting for the last forward."""
        if self._work is None:
            self._wrong.fill_(int(self.misread))
            self._work = dist.all_reduce(
                self._wrong, dist.ReduceOp.MAX, group=self._control, async_op=True
            )

    @property
    def passed(self) -> bool:
        self.cast()
        self._work.wait()
        return not int(self._wrong)
