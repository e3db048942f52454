"""Host memory of offloaded layers, predicted by the cost model."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import BACKWARDS, KEEP, OFFLOAD, Kind, Plan


def host_peak_bytes(cost: Cost, plan: Plan, loads: Loads | None = None) -> tuple[int, ...]:
    """Return, for each stage, the peak bytes that one device has offloaded to host memory.

    Args:
        cost: cost model.
        plan: plan to examine.
        loads: loads of the plan's chunks; None: computed from the plan.
    """
    counts = cost.layout.kinds.of_plan(plan)
    offloaded = {kind: count for (kind, mode), count in counts.items() if mode == OFFLOAD}
    if not offloaded or plan.forward_only:
        return (0,) * plan.stages
    if loads is None:
        loads = cost.loads(plan.chunks, plan.documents)
    each = np.sum(
        [count * cost.memory.saved_bytes((kind, KEEP), loads) for kind, count in offloaded.items()],
        axis=0,
    )
    ways = {Kind.FORWARD: 1, **dict.fromkeys(BACKWARDS, -1)}
    peaks = []
    for stage, order in enumerate(plan.orders):
        moved = [ways.get(op.kind, 0) * each[stage, op.chunk] for op in order]
        peaks.append(int(np.cumsum(moved).max(initial=0.0)))
    return tuple(peaks)
