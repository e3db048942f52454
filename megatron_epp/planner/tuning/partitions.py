"""A partition for a job: by its planner's plans for whole batches."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.partition import Partition, partition_by_time
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import balance_replicas

SKETCH_EFFORT = 1  # of the plans that partitions are compared by


def partition_of(
    cost: Cost, batches: Sequence[Sequence[int]], options: Options, planner: str
) -> Partition:
    """The partition whose plans by ``planner`` take least over whole ``batches`` of the job, of
    which the replica with most work counts."""
    held = [heaviest(lengths, cost) for lengths in batches]
    closed = dataclasses.replace(options, levers=options.levers - {"uneven"})
    return partition_by_time(
        cost, held, lambda moved: sketched_seconds(moved, held, closed, planner)
    )


def sketched_seconds(
    cost: Cost, batches: Sequence[Sequence[int]], options: Options, planner: str
) -> float | None:
    """Seconds of plans with little effort for all ``batches`` of one replica; None where one does
    not fit."""
    effort = min(options.effort, SKETCH_EFFORT)
    sketch = dataclasses.replace(options, effort=effort, open_layers=False)
    total = 0.0
    for lengths in batches:
        try:
            found = PLANNERS[planner](lengths, cost, sketch)
        except ValueError:
            return None
        if not found.fits:
            return None
        total += found.seconds
    return total


def heaviest(lengths: Sequence[int], cost: Cost, lockstep: int = 1) -> list[int]:
    """The documents of the replica with most work; of the block of ``lockstep`` replicas."""
    if cost.dp == lockstep:
        return list(lengths)
    rates = rates_of(cost)
    deals = balance_replicas(lengths, cost, cost.dp // lockstep, least=lockstep)
    held = [[lengths[document] for document in deal] for deal in deals]
    return max(held, key=lambda mine: float(rates.document_seconds(np.array(mine)).sum()))
