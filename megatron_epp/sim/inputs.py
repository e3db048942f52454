"""Orders, seconds and bytes as the arrays that the simulator's loop and a planner's read."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_epp.ir import (
    BACKWARDS,
    COMPUTE,
    DOCUMENT_ITEMS,
    KIND_CODE,
    Effect,
    Item,
    Kind,
    Payload,
    Plan,
    Relation,
    Rules,
    SlicePosition,
    Table,
)
from megatron_epp.sim.engine import OpArrays, Orders
from megatron_epp.sim.rule_arrays import PAYLOAD_CODE


class Ties(Protocol):
    """How slices tie chunks together: ir.Slices or cost.Loads."""

    @property
    def document(self) -> Sequence[int] | np.ndarray: ...
    @property
    def earlier(self) -> Sequence[int] | np.ndarray: ...
    @property
    def later(self) -> Sequence[int] | np.ndarray: ...


def orders_of(plan: Plan) -> Orders:
    orders = plan.rank_orders
    offset = np.zeros(len(orders) + 1, np.int64)
    np.cumsum([len(order) for order in orders], out=offset[1:])
    return Orders(
        np.array([KIND_CODE[op.kind] for order in orders for _, op in order], np.int8),
        np.array([op.chunk for order in orders for _, op in order], np.int64),
        np.array([stage for order in orders for stage, _ in order], np.int64),
        offset,
        np.array(plan.rank_of, np.int64),
    )


def op_arrays(table: Table, ties: Ties, rules: Rules) -> OpArrays:
    """``table`` over chunks whose slices are tied like that, under ``rules``. Kinds that no plan on
    the table has, H and G, have no rows."""
    chunks, stages = len(ties.document), len(table.resident_bytes)
    kinds = [kind for kind in COMPUTE if kind in table.seconds]
    codes = 1 + max(KIND_CODE[kind] for kind in kinds)
    seconds = np.zeros((codes, stages, chunks))
    for kind in kinds:
        seconds[KIND_CODE[kind]] = table.seconds[kind]
    for kind in BACKWARDS:
        seconds[KIND_CODE[kind]] += table.recompute_seconds
    payloads = [payload for payload in Payload if payload in table.link_seconds]
    ring = stages > 1 and Payload.HEAD in payloads
    link_seconds = np.zeros((len(payloads), stages if ring else max(stages - 1, 1), chunks))
    if stages > 1:
        for payload in payloads:
            rows = np.asarray(table.link_seconds[payload])
            link_seconds[PAYLOAD_CODE[payload], : len(rows)] = rows
    return OpArrays(
        seconds,
        link_seconds,
        float(table.link_latency_seconds),
        moved_bytes(table, ties, rules),
        np.array(table.resident_bytes, np.float64),
        np.asarray(ties.earlier, np.int64),
        np.asarray(ties.later, np.int64),
    )


def moved_bytes(table: Table, ties: Ties, rules: Rules) -> np.ndarray:
    """[kinds, 2, stages, chunks]: bytes that an op makes at its start and frees at its stop, read
    off the rule table."""
    document = np.asarray(ties.document, np.int64)
    cut = document >= 0
    related = {Relation.EARLIER: ties.earlier, Relation.LATER: ties.later}
    holds = {
        SlicePosition.ANY: None,
        SlicePosition.FIRST: cut & (np.asarray(ties.earlier) < 0),
        SlicePosition.LAST: cut & (np.asarray(ties.later) < 0),
    }

    def moved(kind: Kind, effect: Effect) -> np.ndarray:
        if effect.item is Item.WORKSPACE:
            held = np.asarray(table.workspace_bytes[kind])
        elif effect.item in DOCUMENT_ITEMS:
            held = np.asarray(table.held_bytes[effect.item])[:, np.maximum(document, 0)] * cut
        else:
            held = np.asarray(table.held_bytes[effect.item])
            if effect.chunk is not Relation.SAME:
                owner = np.asarray(related[effect.chunk], np.int64)
                held = held[:, np.maximum(owner, 0)] * (owner >= 0)
        where = holds[effect.slice]
        return held if where is None else held * where

    codes = 1 + max(KIND_CODE[kind] for kind in (*table.seconds, *rules))
    result = np.zeros((codes, 2, len(table.resident_bytes), len(document)))
    for kind, rule in rules.items():
        for when, effects in enumerate((rule.makes, rule.frees)):
            for effect in effects:
                result[KIND_CODE[kind], when] += moved(kind, effect)
    return result
