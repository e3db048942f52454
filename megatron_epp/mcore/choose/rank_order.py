"""Order of ranks at a start with --epp-layouts on devices of different speeds.

The order determines which ranks form a pipeline. There are three candidates: torchrun's order, an
order with slow devices in the same replicas, and an order with slow devices on the same stages. The
module plans the first batches with each order, and takes the fastest. The planner then assigns
layers and documents by the speed of each rank. The slowest ranks do not train if the layout has
spares, but rank 0 always trains.
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
    """Return the slowness of each device (1: the fastest), or () if ``folder`` has no speeds.

    The function treats devices without a saved speed as the fastest. It ignores differences below
    the threshold of :func:`relative_slowness`.
    """
    kept = read_speeds(folder)
    if kept is None:
        return ()
    factors = relative_slowness([kept.get(device, 1.0) for device in devices])
    return tuple(round(factor, 3) for factor in factors)


def ordered(wanted: Namespace, chosen: ChosenLayout) -> ChosenLayout:
    """Return the ``chosen`` layout with the order of ranks that has the fastest plans.

    ``wanted`` are Megatron's flags, validated with this layout.
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
    """Return :func:`predicted_seconds` of the ``chosen`` layout, with its order of ranks."""
    args = Namespace(**vars(args))
    setattr(args, LAYOUT_KEY, {SLOWNESS: chosen.slowness})
    return predicted_seconds(args, chosen.layout)


def orders(speeds: Sequence[float], unit: int, pp: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield up to three orders of ranks, each with spares last.

    The first order is torchrun's. The second has slow ranks in the same replicas, and the third has
    slow ranks on the same stages. Rank 0 is always first, because it serves torch's store.

    Args:
        speeds: Slowness of each rank, in torchrun's order.
        unit: Number of consecutive ranks that share a stage. Every order keeps them together.
        pp: Number of pipeline stages.
        ranks: Number of ranks that train.
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
    """Split ``units`` into groups of ``size``; move unit 0 and its group to the front."""
    groups = [list(units[at : at + size]) for at in range(0, len(units), size)]
    groups.sort(key=lambda group: 0 not in group)
    groups[0].sort(key=lambda unit: unit != 0)
    return groups
