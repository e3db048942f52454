"""What replicas exchange in an iteration, and how much of it nothing hides.

With Megatron's distributed optimizer the devices that hold the same weights add up their gradients,
a part each (reduce-scatter, float32), and hand the new weights round (all-gather, bf16).
--overlap-grad-reduce lets a stage begin while its last backward runs, --overlap-param-gather lets
the gather end while its first forward runs; a stage whose first op comes late, or whose last comes
early, has that time besides.
"""

from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import BACKWARDS, Kind
from megatron_epp.sim.play import Simulation

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds, of every stage: reducing gradients, gathering weights; and what the iteration takes
    longer for them."""

    reduce_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """Of the busiest stage, hidden and exposed."""
        return max(map(sum, zip(self.reduce_seconds, self.gather_seconds, strict=True)))


def exchange(cost: Cost, played: Simulation, *, overlapped: bool = True) -> Exchange:
    """Of one iteration of a plan that was ``played`` with ``cost``.

    ``overlapped``: with --overlap-grad-reduce and --overlap-param-gather. All zero with one device
    for every weight, under ZeRO 3, whose gathers are in the plan's own ops, and without a network,
    of which nothing is known.
    """
    reduce, gather = _seconds(cost)
    if not reduce.any():
        return Exchange(tuple(reduce.tolist()), tuple(gather.tolist()), 0.0)
    if not overlapped:
        exposed = float(reduce.max() + gather.max())
        return Exchange(tuple(reduce.tolist()), tuple(gather.tolist()), exposed)
    late = np.zeros(cost.stages)  # how long each stage's first op waits for its weights
    end = np.zeros(cost.stages)
    last_backward = np.zeros(cost.stages)
    first = np.full(cost.stages, np.inf)
    first_stop = np.zeros(cost.stages)
    for record in played.records:
        kind = record.op.kind
        if kind is Kind.FORWARD and record.start < first[record.stage]:
            first[record.stage], first_stop[record.stage] = record.start, record.stop
        if (kind in BACKWARDS or kind is Kind.WEIGHT) and record.start >= last_backward[
            record.stage
        ]:
            last_backward[record.stage] = record.start
        if kind in (Kind.FORWARD, *BACKWARDS, Kind.WEIGHT):
            end[record.stage] = max(end[record.stage], record.stop)
    late = np.maximum(gather - first_stop, 0.0)
    reduced = np.maximum(end, last_backward + reduce)
    exposed = float(late.max() + max(reduced.max() - played.seconds, 0.0))
    return Exchange(tuple(reduce.tolist()), tuple(gather.tolist()), exposed)


def _seconds(cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """[stages] of reducing gradients and of gathering weights, alone."""
    nothing = np.zeros(cost.stages)
    if cost.zero != 1 or cost.network is None:
        return nothing, nothing
    reduce, gather = nothing.copy(), nothing.copy()
    dense, experts = cost.parameters
    # Devices that hold the same weights, and how far apart they lie.
    for held, copies, stride in (
        (dense, cost.cp * cost.dp, cost.tp),
        (experts, cost.tp * cost.cp * cost.dp // cost.ep, cost.ep),
    ):
        if copies == 1:
            continue
        rate = cost.network.ring(copies, stride) / ((copies - 1) / copies)
        reduce += held * GRADIENT_BYTES / rate
        gather += held * WEIGHT_BYTES / rate
    return reduce, gather
