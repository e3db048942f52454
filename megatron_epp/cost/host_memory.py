"""What offloaded layers take of the host's memory, by the cost model: from F to B or I."""

import numpy as np

from megatron_epp.cost.cost import Cost, letter_counts
from megatron_epp.cost.layer_kinds import split_choice
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import BACKWARDS, KEEP, OFFLOAD, Kind, Plan


def host_peak_bytes(cost: Cost, plan: Plan, loads: Loads | None = None) -> tuple[int, ...]:
    """Of every stage: the most that lies in the host's memory at a time, for one device.

    ``loads``: of the plan's chunks, where they are padded.
    """
    several = cost.kinds.number > 1
    counts = cost.kinds.of_plan(plan) if several else letter_counts(plan)
    aside = {
        split_choice(choice)[0]: count
        for choice, count in counts.items()
        if split_choice(choice)[1] == OFFLOAD
    }
    if not aside or plan.forward_only:
        return (0,) * plan.stages
    if loads is None:
        loads = cost.loads(plan.chunks, plan.documents)
    each = np.sum(
        [count * cost.saved_bytes((kind, KEEP), loads) for kind, count in aside.items()], axis=0
    )
    ways = {Kind.FORWARD: 1, **dict.fromkeys(BACKWARDS, -1)}
    peaks = []
    for stage, order in enumerate(plan.orders):
        moved = [ways.get(op.kind, 0) * each[stage, op.chunk] for op in order]
        peaks.append(int(np.cumsum(moved).max(initial=0.0)))
    return tuple(peaks)
