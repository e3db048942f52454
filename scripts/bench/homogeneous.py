"""One sequence-parallel degree for all: DeepSpeed-Ulysses, or Megatron-LM with context parallelism.

The devices form equal groups without a pipeline. Unsliced documents in descending length go to the
group that finishes first, up to the tokens that a group holds, one micro-batch after the other.
"""

from collections.abc import Sequence

import numpy as np
from device_groups.costs import (
    GroupCosts,
    MicroBatch,
    PlannedGroups,
    group_costs,
    planned_groups,
)
from device_groups.flexsp import blast

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import PlanError
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch


def plan(
    lengths: Sequence[int],
    cost: Cost,
    options: Options,
    *,
    degree: int,
    name: str,
    recompute_layers: int = 0,
    gather_factor: float | None = None,
) -> PlannedGroups:
    """Return the result for groups of ``degree`` devices.

    ``recompute_layers`` layers of the model are recomputed in full.
    """
    batch = SortedBatch.of(lengths)
    costs = group_costs(cost, recompute_layers, gather_factor)
    which = int(np.log2(degree))
    if 2**which != degree or degree > costs.devices:
        raise ValueError(f"degree {degree}: expected a power of two up to {costs.devices}")
    most = float(costs.most_tokens[which])
    if batch.lengths[0] > most:
        raise PlanError(
            f"a document of {int(batch.lengths[0])} tokens does not fit {degree} devices with "
            f"{recompute_layers} layers recomputed, which hold {int(most)}"
        )
    groups = costs.devices // degree
    count = max(1, int(np.ceil(batch.lengths.sum() / (most * groups))))
    while True:
        batches: list[MicroBatch] = []
        for run in blast(batch.lengths, count):
            held = _assign(batch.lengths, run, groups, most, which, costs)
            if held is None:
                break
            batches.append((np.full(len(held), which), held))
        else:
            break
        count += 1
    note = f"groups of {degree}, {len(batches)} micro-batches"
    note += f", recompute {recompute_layers} layers" if recompute_layers else ""
    return planned_groups(name, batches, batch.lengths, batch.names, costs, cost, note)


def _assign(
    lengths: np.ndarray, run: np.ndarray, groups: int, most: float, which: int, costs: GroupCosts
) -> list[np.ndarray] | None:
    """Return the documents of every nonempty group; None if they do not fit."""
    seconds, tokens = [0.0] * groups, [0.0] * groups
    held: list[list[int]] = [[] for _ in range(groups)]
    for document in run.tolist():
        length = float(lengths[document])
        able = [g for g in range(groups) if tokens[g] + length <= most]
        if not able:
            return None
        group = min(able, key=lambda g: seconds[g])
        held[group].append(document)
        tokens[group] += length
        seconds[group] += costs.seconds(which, length, float(costs.pairs(length)))
    return [np.array(documents) for documents in held if documents]
