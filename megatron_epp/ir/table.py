"""Seconds and bytes of every op of a plan: what a cost model hands to the simulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_epp.ir.op import Kind, Payload
from megatron_epp.ir.rules import Item

# Numbers by [stage][chunk], [stage][document] or [link][chunk]: nested sequences or 2-D arrays.
Grid = Sequence[Sequence[float]] | Any


@dataclass(frozen=True, slots=True)
class Table:
    """Everything that time and memory of one plan on one machine depend on.

    seconds[kind][stage][chunk]            of F, B, I, W alone; B and I without recompute; of H and
                                           G where plans have them
    recompute_seconds[stage][chunk]        added to B, or to I where the backward is split
    comm_seconds[kind][stage][chunk]       the share of ``seconds`` that is exposed communication
                                           (all-to-all, parameter gathers); for the ratios
    link_seconds[payload][link][chunk]     a message occupies its link; link l joins stage l, l+1.
                                           Where plans have H, the payload HEAD has a row more: from
                                           the last stage to the first
    link_latency_seconds                   added to every message, occupying nothing
    held_bytes[item][stage][owner]         what the rule table's items hold per device; owner is a
                                           chunk, or a document for Item.KV and Item.KV_GRADIENTS
    workspace_bytes[kind][stage][chunk]    while the op runs; below 0 where it frees as it goes, so
                                           that it never holds all it makes and all it frees
    resident_bytes[stage]                  all iteration long: states, buffers
    """

    seconds: Mapping[Kind, Grid]
    recompute_seconds: Grid
    comm_seconds: Mapping[Kind, Grid]
    link_seconds: Mapping[Payload, Grid]
    link_latency_seconds: float
    held_bytes: Mapping[Item, Grid]
    workspace_bytes: Mapping[Kind, Grid]
    resident_bytes: Sequence[float]
