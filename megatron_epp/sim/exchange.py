"""Overlap of communication with computation: between stages and between replicas.

Communication within a stage (all-to-all, tensor-parallel gathers) delays the next kernel. It is
therefore exposed and part of every op's seconds (ir.Table.comm_seconds), except for a part of the
experts' all-to-all.

With Megatron's distributed optimizer, the devices that hold the same weights reduce-scatter their
gradients (float32) and all-gather the new weights (bf16). With --overlap-grad-reduce, a stage
begins the reduce-scatter while its last backward runs. With --overlap-param-gather, the all-gather
ends while the stage's first forward runs. If a stage's first op starts late or its last op ends
early, communication also overlaps with this idle time.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import MAKE_GRADIENTS, Kind, Plan, Table
from megatron_epp.sim.play import Simulation, play

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """Communication between replicas in one iteration.

    Attributes:
        reduce_seconds: for each pipeline rank, seconds of the reduce-scatter of gradients.
        gather_seconds: for each pipeline rank, seconds of the all-gather of weights.
        exposed_seconds: seconds by which communication makes the iteration longer.
    """

    reduce_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """Communication time of the busiest rank, both overlapped and exposed."""
        return max(map(sum, zip(self.reduce_seconds, self.gather_seconds, strict=True)))


def exchange(cost: Cost, played: Simulation) -> Exchange:
    """Return the communication between replicas in an iteration simulated with ``cost``.

    All seconds are 0 if no two devices hold the same weights, or if the network is unknown. They
    are also 0 with ZeRO 3, because its gathers are part of the ops.
    """
    rank_of = played.plan.rank_of
    reduce, gather = (np.bincount(rank_of, weights=each) for each in alone_seconds(cost))
    if not reduce.any():
        return Exchange(tuple(reduce.tolist()), tuple(gather.tolist()), 0.0)
    end = np.zeros(len(reduce))
    last_backward = np.zeros(len(reduce))
    first = np.full(len(reduce), np.inf)
    first_stop = np.zeros(len(reduce))
    for record in played.records:
        kind, rank = record.op.kind, rank_of[record.stage]
        if kind is Kind.FORWARD and record.start < first[rank]:
            first[rank], first_stop[rank] = record.start, record.stop
        if kind in MAKE_GRADIENTS and record.start >= last_backward[rank]:
            last_backward[rank] = record.start
        end[rank] = max(end[rank], record.stop)
    # Excess of the gather over the time until the rank's first op ends.
    late = np.maximum(gather - first_stop, 0.0)
    reduced = np.maximum(end, last_backward + reduce)
    exposed = float(late.max() + max(reduced.max() - played.seconds, 0.0))
    return Exchange(tuple(reduce.tolist()), tuple(gather.tolist()), exposed)


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages between the stages of one plan.

    Attributes:
        seconds: sum of the seconds of all messages, from entering the link to arrival.
        exposed_seconds: seconds by which messages make the iteration longer.
    """

    seconds: float
    exposed_seconds: float


def messages(plan: Plan, table: Table, played: Simulation) -> Messages:
    """Return the total and the exposed time of the messages of ``plan``, simulated with ``table``.

    The exposed time is the time that the iteration saves in a second simulation, in which messages
    take no time.
    """
    free = {payload: np.zeros_like(each) for payload, each in table.link_seconds.items()}
    without = play(plan, dataclasses.replace(table, link_seconds=free, link_latency_seconds=0.0))
    on_links = sum(flight.arrive - flight.depart for flight in played.flights)
    return Messages(float(on_links), max(0.0, played.seconds - without.seconds))


def alone_seconds(cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of the reduce-scatter and the all-gather per stage, without overlap."""
    layout = cost.layout
    nothing = np.zeros(layout.stages)
    if layout.zero != 1 or layout.network is None:
        return nothing, nothing
    reduce, gather = nothing.copy(), nothing.copy()
    dense, experts = cost.memory.parameters
    # Devices that hold the same weights, and the distance between them.
    for held, copies, stride in (
        (dense, layout.cp * layout.dp, layout.tp),
        (experts, layout.tp * layout.cp * layout.dp // layout.ep, layout.ep),
    ):
        if copies == 1:
            continue
        rate = layout.network.ring(copies, stride) / ((copies - 1) / copies)
        reduce += held * GRADIENT_BYTES / rate
        gather += held * WEIGHT_BYTES / rate
    return reduce, gather
