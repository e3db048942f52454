"""A placement for a job, together with its partition: planned each way, the fastest is taken.

As a partition it is for a whole run, so it is chosen on whole batches of the job. One stage on
every rank is the way to beat: it sends the fewest messages, and its plans are searched most finely.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.cost.build import even_layers
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import EVENLY, Placement, named_placement
from megatron_epp.planner.options import Options
from megatron_epp.planner.partition import with_layers
from megatron_epp.planner.tuning.partitions import partition_of

# Several stages on a rank must save so much of the time: no model of costs is that exact.
PLACED_PAYS = 0.02
NAMES = ("interleaved 2", "v")


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """``cost`` is the chosen one, with its layers; seconds of plans for all batches by name, None
    where some batch does not fit, or there are too few layers."""

    cost: Cost
    name: str
    seconds: dict[str, float | None]

    @property
    def said(self) -> str:
        """Text on what it was chosen by."""
        even = self.seconds[EVENLY]
        parts = []
        for name, seconds in self.seconds.items():
            if name == EVENLY:
                continue
            if seconds is None:
                parts.append(f"{name} fits no plan")
            elif even is None:
                parts.append(f"{name} fits, one stage a rank does not")
            else:
                gain = 1 - seconds / even
                parts.append(f"{name} {abs(gain):.1%} {'less' if gain >= 0 else 'more'} time")
        return f"against one stage a rank with layers by time: {', '.join(parts)}"


def placement_name(place: tuple[int, ...]) -> str:
    """The name of ``NAMES`` that places stages so."""
    made = {name: named_placement(name, max(place) + 1) for name in NAMES}
    return next(name for name, each in made.items() if each is not None and each.place == place)


def with_placement(cost: Cost, made: Placement) -> Cost:
    """``cost`` of one stage a rank with those of ``made`` instead, of layers as it says, or even
    ones. ValueError: more stages than layers."""
    further = cost.pinned_layers - 1
    *others, last = even_layers(sum(cost.layers) - further, made.stages)
    return dataclasses.replace(
        cost,
        layers=made.layers or (*others, last + further),
        place=() if made.is_even else made.place,
    )


def placement_of(
    cost: Cost, batches: Sequence[Sequence[int]], options: Options, planner: str
) -> PlacementChoice:
    """The placement of ``NAMES``, or one stage a rank, whose plans by ``planner`` take least over
    whole ``batches`` of the job, each with layers by time. ``cost``: of one stage a rank. A pure
    function of what it is given."""
    seconds: dict[str, float | None] = {}
    chosen: Cost | None = None
    best = EVENLY
    for name in (EVENLY, *NAMES):
        made = named_placement(name, cost.ranks)
        assert made is not None
        seconds[name] = None
        if made.stages > sum(cost.layers) - cost.pinned_layers + 1:
            continue
        here = with_placement(cost, made) if name != EVENLY else cost
        if with_layers(here, here.layers) is None and name != EVENLY:
            continue
        found = partition_of(here, batches, options, planner)
        seconds[name] = taken = found.tried[found.layers]
        least = seconds[best]
        asked = 1 - PLACED_PAYS if best == EVENLY else 1.0
        better = taken is not None and (least is None or taken < least * asked)
        if chosen is None or better:
            chosen, best = dataclasses.replace(here, layers=found.layers), name
    assert chosen is not None
    return PlacementChoice(chosen, best, seconds)
