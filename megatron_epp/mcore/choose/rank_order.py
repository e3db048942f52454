"""Order of ranks of unlike speed at a start with --epp-layouts: which of them form a pipeline.

Slow devices together in replicas, together on stages, or as torchrun numbers them: plans of the
first batches decide. Layers and documents follow from how slow each rank of the order is. Where
ranks are left, the slowest wait as spares.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from megatron_epp.control.drift import relative_slowness
from megatron_epp.mcore.choose.layouts import ChosenLayout, predicted_seconds
from megatron_epp.mcore.flags.config import LAYOUT_KEY, SLOWNESS
from megatron_epp.mcore.job.device_speeds import read_speeds
from megatron_epp.planner.choose.choice import PARTITION_PAYS


def speeds_of(devices: Sequence[str], folder: str | None) -> tuple[float, ...]:
    """Return how slow the ``devices`` of a start are, rank by rank; none: nothing is known.

    Devices that nothing is known of count as the fastest; ones as alike as drift calls them are.
    """
    kept = read_speeds(folder)
    if kept is None:
        return ()
    factors = relative_slowness([kept.get(device, 1.0) for device in devices])
    return tuple(round(factor, 3) for factor in factors)


def ordered(wanted: Namespace, chosen: ChosenLayout) -> ChosenLayout:
    """Return the layout with the order of ranks that plans are fastest with, for its speeds.

    ``wanted``: Megatron's flags as its layout validates them.
    """
    unit = chosen.layout.least_ranks(wanted.expert_tensor_parallel_size) // chosen.layout.pp
    best, least = replace(chosen, order=()), math.inf
    for order in orders(chosen.speeds, unit, chosen.layout.pp, chosen.ranks):
        one = replace(chosen, order=order)
        seconds = seconds_of(wanted, one)
        if seconds is not None and seconds < least * (1 - PARTITION_PAYS):
            best, least = replace(one, seconds=seconds), seconds
    return best


def seconds_of(args: Namespace, chosen: ChosenLayout) -> float | None:
    """Return what :func:`predicted_seconds` says of the layout on these devices in this order."""
    args = Namespace(**vars(args))
    setattr(args, LAYOUT_KEY, {SLOWNESS: chosen.slowness})
    return predicted_seconds(args, chosen.layout)


def orders(speeds: Sequence[float], unit: int, pp: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of ranks to try: as they are, slow ones together in replicas, and on stages.

    The first ``ranks`` of an order train. Those of a ``unit``, which share a stage's tensors, stay
    together; rank 0 stays the first, as torch's rendezvous and the store of spares are its own.
    """
    units = len(speeds) // unit
    taken = ranks // unit
    own = [max(speeds[at * unit : (at + 1) * unit]) for at in range(units)]
    fastest = sorted(range(1, units), key=lambda at: own[at])[: taken - 1]
    kept = [0, *sorted(fastest)]
    spare = [at for at in range(units) if at not in kept]
    by_speed = sorted(kept, key=lambda at: own[at])
    replicas = taken // pp
    of_replicas, of_stages = _grouped(by_speed, pp), _grouped(by_speed, replicas)
    together = [[of_replicas[r][s] for r in range(replicas)] for s in range(pp)]
    for of_units in dict.fromkeys(
        tuple(chain.from_iterable(stages)) for stages in ([kept], together, of_stages)
    ):
        order = [at * unit + each for at in (*of_units, *spare) for each in range(unit)]
        yield (*order, *range(units * unit, len(speeds)))


def _grouped(units: Sequence[int], size: int) -> list[list[int]]:
    """Return ``units`` in groups of ``size``, in their order but for unit 0, which comes first."""
    groups = [list(units[at : at + size]) for at in range(0, len(units), size)]
    groups.sort(key=lambda group: 0 not in group)
    groups[0].sort(key=lambda unit: unit != 0)
    return groups
