"""Devices of unlike speed at a start with --epp-layouts: which ranks form a pipeline together.

What a job measures of its devices, when it begins and when one becomes slow, is kept next to the
checkpoint by host and local rank. The next start reads it, orders its ranks in the way that plans
of the first batches are fastest with, slow devices together in replicas, together on stages, or as
torchrun numbers them, and has its cost model say how slow each rank is: layers and documents
follow from that. Where ranks are left, the slowest wait as spares.
"""

import json
import math
import os
import socket
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_epp.control.drift import SLOW
from megatron_epp.control.files import write_atomically
from megatron_epp.mcore.choose.kept import LAYOUT_KEY, SLOWNESS
from megatron_epp.mcore.choose.layouts import (
    ChosenLayout,
    predicted_seconds,
)
from megatron_epp.runtime.groups import Groups
from megatron_epp.safe_files import bounded_text

SPEEDS_FILE = "epp-device-speeds.json"  # {"host local-rank": times as slow as the fastest, ...}
ORDER_PAYS = 0.005  # of the time, as with layers by time
_MOST = 1e3


# ------------------------------------------------------------------ the file


def this_rank() -> str:
    """Return the name of this rank's device: its host and its number there."""
    return f"{socket.gethostname()} {os.environ.get('LOCAL_RANK', '0')}"


def read_speeds(folder: str | None) -> dict[str, float] | None:
    """Return how many times as slow each device is as the fastest; None: nothing was kept.

    ValueError: the file is damaged.
    """
    path = Path(folder or "") / SPEEDS_FILE
    if not folder or not path.exists():
        return None
    try:
        kept = json.loads(bounded_text(path, "the speeds of a job's devices"))
        if not isinstance(kept, dict) or not all(
            isinstance(factor, int | float) and 1 <= factor <= _MOST for factor in kept.values()
        ):
            raise ValueError("expected an object from a device to a number from 1 on")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: no speeds of devices ({error}); delete the file: devices then count as alike "
            "until they are measured again"
        ) from error
    return kept


def keep_speeds(slowness: Sequence[float], groups: Groups, folder: str | None) -> None:
    """Have rank 0 keep how slow the devices of this job are. Collective.

    ``slowness``: of every pipeline rank, for every replica or for all; none: alike. OSError: the
    file cannot be written.
    """
    own = this_rank(), groups.replica * groups.pipeline_size + groups.pipeline_rank
    every: list[Any] = [None] * groups.control.size()
    dist.all_gather_object(every, own, group=groups.control)
    if groups.control.rank() != 0 or not folder:
        return
    before = read_speeds(folder)
    of_places = slowness or (1.0,)
    measured = {device: of_places[place % len(of_places)] for device, place in every}
    if before is not None or set(measured.values()) != {1.0}:
        kept = json.dumps({**(before or {}), **measured}, indent=1)
        write_atomically(Path(folder) / SPEEDS_FILE, kept + "\n")


# ------------------------------------------------------------------ the order of ranks


def speeds_of(devices: Sequence[str], folder: str | None) -> tuple[float, ...]:
    """Return how slow the ``devices`` of a start are, rank by rank; none: nothing is known.

    Devices that nothing is known of count as the fastest; ones as alike as drift calls them are.
    """
    kept = read_speeds(folder)
    if kept is None:
        return ()
    factors = [kept.get(device, 1.0) for device in devices]
    least = min(factors)
    return tuple(round(f / least, 3) if f / least > SLOW else 1.0 for f in factors)


def are_unlike(speeds: Sequence[float]) -> bool:
    """Whether some of a start's devices are slower than others."""
    return len(set(speeds)) > 1


def ordered(wanted: Namespace, chosen: ChosenLayout) -> ChosenLayout:
    """Return the layout with the order of ranks that plans are fastest with, for its speeds.

    ``wanted``: Megatron's flags as its layout validates them.
    """
    unit = chosen.layout.least_ranks(wanted.expert_tensor_parallel_size) // chosen.layout.pp
    best, least = replace(chosen, order=()), math.inf
    for order in orders(chosen.speeds, unit, chosen.layout.pp, chosen.ranks):
        one = replace(chosen, order=order)
        seconds = seconds_of(wanted, one)
        if seconds is not None and seconds < least * (1 - ORDER_PAYS):
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
