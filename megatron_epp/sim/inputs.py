"""Orders, seconds and bytes as the arrays that the simulator's loop reads."""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_epp.ir import BACKWARDS, COMPUTE, DOCUMENT_ITEMS, Item, Op, Payload, Table
from megatron_epp.sim.engine import Board, Orders
from megatron_epp.sim.rule_arrays import HELD, ITEM_CODE, KIND_CODE, PAYLOAD_CODE


def orders_of(orders: Sequence[Sequence[Op]]) -> Orders:
    offset = np.zeros(len(orders) + 1, np.int64)
    np.cumsum([len(order) for order in orders], out=offset[1:])
    return Orders(
        np.array([KIND_CODE[op.kind] for order in orders for op in order], np.int8),
        np.array([op.chunk for order in orders for op in order], np.int64),
        offset,
    )


def ops_of(orders: Orders) -> tuple[tuple[Op, ...], ...]:
    """The inverse of :func:`orders_of`."""
    known: dict[tuple[int, int], Op] = {}  # one value for an op that stands on every stage
    ops = []
    for pair in zip(orders.kind.tolist(), orders.chunk.tolist(), strict=True):
        if pair not in known:
            known[pair] = Op(COMPUTE[pair[0]], pair[1])
        ops.append(known[pair])
    bounds = orders.offset.tolist()
    return tuple(tuple(ops[a:b]) for a, b in itertools.pairwise(bounds))


def board_of(
    table: Table, document: Sequence[int], earlier: Sequence[int], later: Sequence[int]
) -> Board:
    """``table`` over chunks whose slices are tied like that (ir.Slices, cost.Loads)."""
    documents = np.asarray(document, np.int64)
    stages, chunks = len(table.resident_bytes), len(documents)
    shape = (stages, chunks)
    seconds = np.empty((len(COMPUTE), *shape))
    workspace = np.empty((len(COMPUTE), *shape))
    for kind in COMPUTE:
        seconds[KIND_CODE[kind]] = table.seconds[kind]
        workspace[KIND_CODE[kind]] = table.workspace_bytes[kind]
    for kind in BACKWARDS:
        seconds[KIND_CODE[kind]] += table.recompute_seconds
    link_seconds = np.zeros((len(Payload), max(stages - 1, 1), chunks))
    if stages > 1:
        for payload in Payload:
            link_seconds[PAYLOAD_CODE[payload]] = table.link_seconds[payload]
    held = np.zeros((len(HELD), *shape))
    for item, grid in table.held_bytes.items():
        if item in DOCUMENT_ITEMS:
            of_document = np.asarray(grid, float)[:, documents]  # -1 wraps: masked below
            held[ITEM_CODE[item]] = np.where(documents >= 0, of_document, 0.0)
        elif item is not Item.WORKSPACE:
            held[ITEM_CODE[item]] = grid
    return Board(
        seconds,
        link_seconds,
        float(table.link_latency_seconds),
        held,
        workspace,
        np.array(table.resident_bytes, np.float64),
        documents,
        np.asarray(earlier, np.int64),
        np.asarray(later, np.int64),
    )
