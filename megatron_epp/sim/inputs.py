"""Conversion of orders, seconds and bytes to arrays for the compiled simulator and planner."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_epp.cost.loads import Loads
from megatron_epp.ir import (
    BACKWARDS,
    COMPUTE,
    DOCUMENT_ITEMS,
    KIND_CODE,
    Effect,
    Item,
    Kind,
    Op,
    Payload,
    Plan,
    Relation,
    Rules,
    SlicePosition,
    Slices,
    Table,
)
from megatron_epp.sim.engine import OpArrays, Orders
from megatron_epp.sim.rule_arrays import PAYLOAD_CODE

# Kinds whose workspace depends on the recompute choice, as the activations of a chunk do.
RECOMPUTING = (Kind.FORWARD, *BACKWARDS)


def orders_of(plan: Plan) -> Orders:
    """Return the orders of ``plan`` as arrays."""
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


def op_arrays(
    table: Table,
    ties: Slices | Loads,
    rules: Rules,
    orders: Sequence[Sequence[Op]] | None = None,
    fixed_bytes: np.ndarray | None = None,
) -> OpArrays:
    """Return the seconds and bytes of ``table`` as arrays.

    The first dimension of ``seconds`` ends with the last op kind (in the order of ir.KIND_CODE)
    that ``table`` contains. Earlier op kinds that it does not contain have zeros.

    Args:
        table: seconds and bytes of the ops.
        ties: order of the slices of each document.
        rules: rule table of the plan.
        orders: order of ops of every stage if known; see :func:`moved_bytes`.
        fixed_bytes: result of :func:`moved_bytes` with ``recomputed=False``, if known.
    """
    chunks, stages = len(ties.document), len(table.resident_bytes)
    kinds = [kind for kind in COMPUTE if kind in table.seconds]
    codes = 1 + max(KIND_CODE[kind] for kind in kinds)
    seconds = np.zeros((codes, stages, chunks))
    for kind in kinds:
        seconds[KIND_CODE[kind]] = table.seconds[kind]
    for kind in BACKWARDS:
        if kind in table.seconds:
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
        moved_bytes(table, ties, rules, orders)
        if fixed_bytes is None
        else fixed_bytes + moved_bytes(table, ties, rules, orders, recomputed=True),
        np.array(table.resident_bytes, np.float64),
        np.asarray(ties.earlier, np.int64),
    )


def moved_bytes(
    table: Table,
    ties: Slices | Loads,
    rules: Rules,
    orders: Sequence[Sequence[Op]] | None = None,
    recomputed: bool | None = None,
) -> np.ndarray:
    """Return [kinds, 2, stages, chunks]: bytes that ops allocate at the start and free at the stop.

    Args:
        table: bytes of the ops.
        ties: order of the slices of each document.
        rules: rule table of the plan.
        orders: order of ops of every stage. If documents branch, it determines which chunk is the
            last to attend to a document. None: forwards run in the order of the readers in
            ``ties.kept``, and backwards in reverse.
        recomputed: True: only bytes that depend on recompute; False: only bytes that do not depend
            on it; None: both. The two parts add up exactly, because bytes are whole numbers.
    """
    earlier = np.asarray(ties.earlier, np.int64)
    owners = None if recomputed else _owners(ties, len(table.resident_bytes), orders)
    codes = 1 + max(KIND_CODE[kind] for kind in (*table.seconds, *rules))
    result = np.zeros((codes, 2, len(table.resident_bytes), len(earlier)))

    def move(into: np.ndarray, kind: Kind, effect: Effect) -> None:
        if effect.item is Item.WORKSPACE:
            into += np.asarray(table.workspace_bytes[kind])
            return
        held = np.asarray(table.held_bytes[effect.item], np.float64)
        if effect.item in DOCUMENT_ITEMS:
            assert owners is not None
            assert effect.slice is not SlicePosition.ANY, "documents own it"
            last = owners.last_forward if kind is Kind.FORWARD else owners.last_backward
            first = effect.slice is SlicePosition.FIRST
            chunks = np.broadcast_to(owners.first if first else last, last.shape)
            stages = np.arange(len(into))[:, None]
            np.add.at(into, (stages, chunks), held[:, owners.document])
        elif effect.chunk is Relation.EARLIER:
            into += held[:, np.maximum(earlier, 0)] * (earlier >= 0)
        elif effect.chunk is Relation.LATER:
            after = np.flatnonzero(earlier >= 0)
            np.add.at(into.T, earlier[after], held[:, after].T)
        else:
            into += held

    for kind, rule in rules.items():
        for when, effects in enumerate((rule.makes, rule.frees)):
            for effect in effects:
                changes = effect.item is Item.ACTIVATIONS or (
                    effect.item is Item.WORKSPACE and kind in RECOMPUTING
                )
                if recomputed is None or recomputed == changes:
                    move(result[KIND_CODE[kind], when], kind, effect)
    return result


class _Owners(NamedTuple):
    """D documents with cached K and V, and the chunks that allocate and free K and V.

    Attributes:
        document: [D], index of the document.
        first: [D], chunk with the first slice.
        last_forward: [stages, D], chunk of each stage's last forward that attends to the document.
        last_backward: [stages, D], chunk of each stage's first backward that adds to the gradients
            of the document's K and V.
    """

    document: np.ndarray
    first: np.ndarray
    last_forward: np.ndarray
    last_backward: np.ndarray


def _owners(ties: Slices | Loads, stages: int, orders: Sequence[Sequence[Op]] | None) -> _Owners:
    """Return the chunks that allocate and free K and V; ``orders`` is as in :func:`moved_bytes`."""
    if ties.kept is None:
        document, later = np.asarray(ties.document, np.int64), np.asarray(ties.later, np.int64)
        first = np.flatnonzero((document >= 0) & (np.asarray(ties.earlier) < 0))
        ends = np.flatnonzero((document >= 0) & (later < 0))
        first = first[np.argsort(document[first], kind="stable")]
        ends = ends[np.argsort(document[ends], kind="stable")]
        last = np.broadcast_to(ends, (stages, len(ends)))
        return _Owners(document[first], first, last, last)
    forward = np.array([[each.readers[-1] for each in ties.kept]] * stages, np.int64)
    forward = forward.reshape(stages, len(ties.kept))
    backward = forward.copy()
    if orders is not None and any(len(each.readers) > 1 for each in ties.kept):
        for stage, order in enumerate(orders):
            done: dict[Kind, dict[int, int]] = {Kind.FORWARD: {}, Kind.BACKWARD: {}}
            for at, op in enumerate(order):
                if op.kind is Kind.FORWARD:
                    done[Kind.FORWARD][op.chunk] = at
                elif op.kind in BACKWARDS:
                    done[Kind.BACKWARD][op.chunk] = at
            for number, each in enumerate(ties.kept):
                forward[stage, number] = max(each.readers, key=done[Kind.FORWARD].__getitem__)
                if done[Kind.BACKWARD]:
                    backward[stage, number] = min(each.readers, key=done[Kind.BACKWARD].__getitem__)
    document = np.array([each.document for each in ties.kept], np.int64)
    first = np.array([each.first for each in ties.kept], np.int64)
    return _Owners(document, first, forward, backward)
