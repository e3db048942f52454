"""Breaks replicas in lockstep on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``), as sabotage.py. What would make ranks wait for each other
must be refused, which ends a certificate: a test puts one such way in the place of ``WAYS``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy
import torch.distributed as dist

from megatron_epp.control.step_source import SourcedStep
from megatron_epp.ir import Step
from megatron_epp.layers.experts.ledger import Ledger
from megatron_epp.mcore.certify.rank import DrawnSteps, InMemory


def deal_wrongly() -> AbstractContextManager:
    """The second replica reads the tokens of another document than it was dealt."""
    plain = InMemory.inputs

    def inputs(self: InMemory, sample: int, start: int, stop: int) -> numpy.ndarray:
        if dist.get_rank() == 0:
            return plain(self, sample, start, stop)
        other = self.drawn.tokens[sample - 1]
        return numpy.resize(other, stop)[start:stop]

    return patch.object(InMemory, "inputs", inputs)


def count_empty_chunks() -> AbstractContextManager:
    """The row of an empty chunk counts as a token of a document."""
    plain = Ledger._owners

    def owners(self: Ledger, state):
        found = plain(self, state)
        if not state.rows:
            found[:] = 0
        return found

    return patch.object(Ledger, "_owners", owners)


def _other_step(change: Callable[[Step], Step]) -> AbstractContextManager:
    """All ranks hold the step that ``change`` makes of the drawn one."""
    plain = DrawnSteps.step

    def step(self: DrawnSteps, iteration: int, lengths, forward_only: bool) -> SourcedStep:
        changed = change(plain(self, iteration, lengths, forward_only).step)
        return SourcedStep(changed, str(changed))

    return patch.object(DrawnSteps, "step", step)


def skip_empty_chunks() -> AbstractContextManager:
    """A replica leaves out the ops of a chunk that it has nothing in."""

    def change(step: Step) -> Step:
        def skipping(plan):
            orders = tuple(
                tuple(op for op in order if plan.chunks[op.chunk].spans) for order in plan.orders
            )
            return replace(plan, orders=orders)

        return replace(step, plans=tuple(map(skipping, step.plans)))

    return _other_step(change)


def recompute_alone() -> AbstractContextManager:
    """The second replica runs experts again where the first does not."""

    def change(step: Step) -> Step:
        first, second = step.plans
        other = tuple(
            tuple(choice.translate(str.maketrans("kcnaofmb", "ffffffkk")) for choice in stage)
            for stage in second.recompute
        )
        return replace(step, plans=(first, replace(second, recompute=other)))

    return _other_step(change)


def run_freely() -> AbstractContextManager:
    """Nobody says that the replicas are in lockstep."""
    return _other_step(lambda step: replace(step, lockstep=1))


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    nullcontext,
    deal_wrongly,  # from here on the bias is not where it should be
    count_empty_chunks,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
