"""A chunking on a machine as arrays: what schedulers and searches compute with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import (
    DOCUMENT_ITEMS,
    KEEP,
    TRAINING,
    Effect,
    Item,
    Kind,
    Payload,
    Rule,
    Slice,
    Table,
)
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.slicing import Rates

Counts = Mapping[str, np.ndarray]  # by recompute letter: layers [stages, chunks] with that choice

WHOLE = (Kind.FORWARD, Kind.BACKWARD)
SPLIT = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)


def rates_of(cost: Cost) -> Rates:
    """Forward plus backward on the average stage."""
    per = cost.seconds_per(Kind.FORWARD) + cost.seconds_per(Kind.BACKWARD)
    token, pair, chunk = per.mean(axis=0).tolist()
    return Rates(token, pair, chunk)


def padded(tokens: np.ndarray, multiple: int) -> np.ndarray:
    return -(-tokens // multiple) * multiple


def loads_of(chunking: Chunking, lengths: np.ndarray, multiple: int = 1) -> Loads:
    """What the cost model reads; the tokens that a chunk is padded by count as a short document."""
    cut = chunking.document >= 0
    same = cut[1:] & (chunking.document[1:] == chunking.document[:-1])
    number = np.arange(chunking.count)
    earlier = np.full(chunking.count, -1, dtype=np.int64)
    later = np.full(chunking.count, -1, dtype=np.int64)
    earlier[1:][same] = number[:-1][same]
    later[:-1][same] = number[1:][same]
    return Loads(
        tokens=padded(chunking.tokens, multiple).astype(np.float64),
        pairs=chunking.pairs.astype(np.float64),
        cut_tokens=chunking.slice_tokens.astype(np.float64),
        document=chunking.document,
        earlier=earlier,
        later=later,
        lengths=lengths.astype(np.float64),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds [stages, chunks] (recompute included) and bytes of every op of a chunking.

    whole_bytes[kind, 0, stage, chunk]   that F (kind 0) or B (1) makes at its start
    whole_bytes[kind, 1, stage, chunk]   that it frees at its stop
    split_bytes                          the same for F, I and W
    budget_bytes                         per stage, what is left beside its residents
    """

    forward_seconds: np.ndarray
    backward_seconds: np.ndarray
    input_seconds: np.ndarray
    weight_seconds: np.ndarray
    backward_order: np.ndarray
    last_of_group: np.ndarray
    link_forward_seconds: np.ndarray
    link_backward_seconds: np.ndarray
    link_latency_seconds: float
    whole_bytes: np.ndarray
    split_bytes: np.ndarray
    budget_bytes: np.ndarray

    @property
    def stages(self) -> int:
        return self.forward_seconds.shape[0]

    @property
    def chunks(self) -> int:
        return self.forward_seconds.shape[1]


def with_kept(cost: Cost, counts: Counts, chunks: int) -> Counts:
    """``counts`` of what is recomputed, and of the layers that are left: kept."""
    kept = np.tile(np.array(cost.layers, dtype=np.float64)[:, None], (1, chunks))
    for grid in counts.values():
        kept = kept - grid
    return {**counts, KEEP: kept}


def work_of(cost: Cost, chunking: Chunking, loads: Loads, counts: Counts) -> Work:
    """The work of ``chunking`` where ``counts`` layers are recomputed."""
    table = cost.table_of(loads, with_kept(cost, counts, chunking.count))
    again = np.asarray(table.recompute_seconds)
    links = table.link_seconds
    return Work(
        forward_seconds=_grid(table.seconds[Kind.FORWARD]),
        backward_seconds=_grid(table.seconds[Kind.BACKWARD]) + again,
        input_seconds=_grid(table.seconds[Kind.INPUT]) + again,
        weight_seconds=_grid(table.seconds[Kind.WEIGHT]),
        backward_order=chunking.backward,
        last_of_group=np.repeat(chunking.starts[1:] - 1, chunking.sizes),
        link_forward_seconds=_grid(links[Payload.ACTIVATION]).reshape(-1, chunking.count),
        link_backward_seconds=_grid(links[Payload.GRADIENT]).reshape(-1, chunking.count),
        link_latency_seconds=float(table.link_latency_seconds),
        whole_bytes=moves(table, loads, WHOLE),
        split_bytes=moves(table, loads, SPLIT),
        budget_bytes=np.array(cost.budget_bytes) - np.array(cost.states_bytes),
    )


def moves(
    table: Table, loads: Loads, kinds: tuple[Kind, ...], rules: Mapping[Kind, Rule] = TRAINING
) -> np.ndarray:
    """[kinds, 2, stages, chunks]: bytes that an op makes at its start and frees at its stop.

    Read off the rule table, as checker, simulator and executor do.
    """
    stages = len(table.resident_bytes)
    result = np.zeros((len(kinds), 2, stages, loads.chunks))
    for index, kind in enumerate(kinds):
        for when, effects in enumerate((rules[kind].makes, rules[kind].frees)):
            for effect in effects:
                result[index, when] += _held(table, loads, kind, effect)
    return result


def _held(table: Table, loads: Loads, kind: Kind, effect: Effect) -> np.ndarray:
    if effect.item is Item.WORKSPACE:
        held = np.asarray(table.workspace_bytes[kind])
    elif effect.item in DOCUMENT_ITEMS:
        held = np.asarray(table.held_bytes[effect.item])[:, np.maximum(loads.document, 0)]
    else:
        held = np.asarray(table.held_bytes[effect.item])
    cut = loads.document >= 0
    match effect.slice:
        case Slice.FIRST:
            return held * (cut & (loads.earlier < 0))
        case Slice.LAST:
            return held * (cut & (loads.later < 0))
        case _:
            return held


def _grid(values: Any) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float64)
