"""Faults of replicas in lockstep.

What would make ranks wait for each other must be refused, which ends a certificate: it comes last.
"""

from dataclasses import replace

import numpy
import torch.distributed as dist

from megatron_epp.control.step_source import SourcedStep
from megatron_epp.ir import Plan
from megatron_epp.layers.moe.router_stats import RouterStats
from megatron_epp.mcore.certify.rank import DrawnSteps, InMemory
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def deal_wrongly(inputs, memory: InMemory, sample: int, start: int, stop: int) -> numpy.ndarray:
    if dist.get_rank() == 0:
        return inputs(memory, sample, start, stop)
    return numpy.resize(memory.drawn.tokens[sample - 1], stop)[start:stop]


def count_empty_chunks(owners, stats: RouterStats, state):
    found = owners(stats, state)
    if not state.rows:
        found[:] = 0
    return found


def without_empty_chunks(plan: Plan) -> Plan:
    orders = tuple(
        tuple(op for op in order if plan.chunks[op.chunk].spans) for order in plan.orders
    )
    return replace(plan, orders=orders)


def skip_empty_chunks(step, *call) -> SourcedStep:
    drawn = step(*call).step
    changed = replace(drawn, plans=tuple(map(without_empty_chunks, drawn.plans)))
    return SourcedStep(changed, str(changed))


# Of the four replicas, batch by batch; nobody is to wait for the last one.
FAULTS: Faults = {
    "nothing": nothing,
    "nothing again": nothing,
    # The second replica reads the tokens of another document than it was dealt. From here on the
    # bias is not where it should be.
    "deal wrongly": fault(InMemory, "inputs", deal_wrongly),
    # The row of an empty chunk counts as a token of a document.
    "count empty chunks": fault(RouterStats, "_owners", count_empty_chunks),
    # A replica leaves out the ops of a chunk that it has nothing in; all ranks hold that step.
    "skip empty chunks": fault(DrawnSteps, "step", skip_empty_chunks),
}
around = in_turn(FAULTS)
