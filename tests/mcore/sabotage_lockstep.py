"""Breaks replicas in lockstep on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``), as sabotage.py. What would make ranks wait for each other
must be refused, which ends a certificate: it comes last.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import numpy
import torch.distributed as dist

from megatron_epp.control.step_source import SourcedStep
from megatron_epp.ir import Plan
from megatron_epp.layers.moe.router_stats import RouterStats
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
    plain = RouterStats._owners

    def owners(self: RouterStats, state):
        found = plain(self, state)
        if not state.rows:
            found[:] = 0
        return found

    return patch.object(RouterStats, "_owners", owners)


def skip_empty_chunks() -> AbstractContextManager:
    """A replica leaves out the ops of a chunk that it has nothing in; all ranks hold that step."""
    plain = DrawnSteps.step

    def skipping(plan: Plan) -> Plan:
        orders = tuple(
            tuple(op for op in order if plan.chunks[op.chunk].spans) for order in plan.orders
        )
        return replace(plan, orders=orders)

    def step(self: DrawnSteps, iteration: int, lengths, forward_only: bool) -> SourcedStep:
        drawn = plain(self, iteration, lengths, forward_only).step
        changed = replace(drawn, plans=tuple(map(skipping, drawn.plans)))
        return SourcedStep(changed, str(changed))

    return patch.object(DrawnSteps, "step", step)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    nullcontext,
    deal_wrongly,  # from here on the bias is not where it should be
    count_empty_chunks,
    skip_empty_chunks,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
