"""Seconds and bytes of every op of a plan; a cost model computes them for the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_epp.ir.op import Kind, Payload
from megatron_epp.ir.rules import Item

# Numbers by [stage][chunk], [stage][document] or [link][chunk]: nested sequences or 2-D arrays.
Grid = Sequence[Sequence[float]] | Any


@dataclass(frozen=True, slots=True)
class Table:
    """Times and memory of one plan on one machine.

    Attributes:
        seconds: ``[kind][stage][chunk]``, seconds of an op; for B and I, without recompute.
        recompute_seconds: ``[stage][chunk]``, seconds of recompute, added to B, or to I if the
            backward is split.
        comm_seconds: ``[kind][stage][chunk]``, part of ``seconds`` that is exposed communication
            within a stage; reports show it as a fraction of the time.
        link_seconds: ``[payload][link][chunk]``, seconds that a message occupies its link; link l
            joins stages l and l + 1. The payload HEAD has one more link, from the last stage to the
            first.
        link_latency_seconds: seconds that every message takes without occupying its link.
        held_bytes: ``[item][stage][owner]``, bytes of an item (ir.rules.Item) on a device. The
            owner is a chunk, or a document for Item.KV and Item.KV_GRADIENTS.
        workspace_bytes: ``[kind][stage][chunk]``, peak bytes during the op minus the bytes of all
            items, including those that the op makes or frees; negative if it frees some before it
            makes others.
        resident_bytes: ``[stage]``, bytes during the whole iteration: model states and buffers.
    """

    seconds: Mapping[Kind, Grid]
    recompute_seconds: Grid
    comm_seconds: Mapping[Kind, Grid]
    link_seconds: Mapping[Payload, Grid]
    link_latency_seconds: float
    held_bytes: Mapping[Item, Grid]
    workspace_bytes: Mapping[Kind, Grid]
    resident_bytes: Sequence[float]
