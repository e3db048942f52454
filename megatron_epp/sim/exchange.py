"""Communication that overlaps computation or delays it: messages between stages, and between
replicas.

What is exchanged inside a stage, all-to-all and tensor-parallel gathers, stands in the way of the
next kernel and is exposed: it is a part of every op's seconds (Cost.comm_seconds).

Replicas: with Megatron's distributed optimizer the devices that hold the same weights add up their
gradients, a part each (reduce-scatter, float32), and hand the new weights round (all-gather, bf16).
--overlap-grad-reduce lets a stage begin while its last backward runs, --overlap-param-gather lets
the gather end while its first forward runs; a stage whose first op comes late, or whose last comes
early, has that time besides.
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
    """Seconds, of every rank: reducing gradients, gathering weights; and what the iteration takes
    longer for them."""

    reduce_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the busiest rank, hidden and exposed."""
        return max(map(sum, zip(self.reduce_seconds, self.gather_seconds, strict=True)))


def exchange(cost: Cost, played: Simulation) -> Exchange:
    """Exchange of one iteration of a plan that was ``played`` with ``cost``, overlapped.

    All zero with one device for every weight, under ZeRO 3, whose gathers are in the plan's own
    ops, and without a network, of which nothing is known.
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
    # How much longer the gather takes than the rank's first op is away, its own time included.
    late = np.maximum(gather - first_stop, 0.0)
    reduced = np.maximum(end, last_backward + reduce)
    exposed = float(late.max() + max(reduced.max() - played.seconds, 0.0))
    return Exchange(tuple(reduce.tolist()), tuple(gather.tolist()), exposed)


@dataclass(frozen=True, slots=True)
class Messages:
    """Between the stages of one plan: seconds on the links, all together; and what the iteration
    takes longer than if messages took no time."""

    seconds: float
    exposed_seconds: float


def messages(plan: Plan, table: Table, played: Simulation) -> Messages:
    """Messages of ``plan``, which was ``played`` on ``table``; the same orders, played without
    links, say what no computation hides."""
    free = {payload: np.zeros_like(each) for payload, each in table.link_seconds.items()}
    without = play(plan, dataclasses.replace(table, link_seconds=free, link_latency_seconds=0.0))
    on_links = sum(flight.arrive - flight.depart for flight in played.flights)
    return Messages(float(on_links), max(0.0, played.seconds - without.seconds))


def alone_seconds(cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """[stages] of reducing gradients and of gathering weights, alone."""
    layout = cost.layout
    nothing = np.zeros(layout.stages)
    if layout.zero != 1 or layout.network is None:
        return nothing, nothing
    reduce, gather = nothing.copy(), nothing.copy()
    dense, experts = cost.memory.parameters
    # Devices that hold the same weights, and how far apart they lie.
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
