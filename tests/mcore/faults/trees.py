"""Faults of what ties documents to those that they continue."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from torch import Tensor

from megatron_epp.ir import Plan
from megatron_epp.layers import chunk_state
from megatron_epp.layers.chunk_state import chunk_rows
from megatron_epp.mcore.data import chunk_batches
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder
from megatron_epp.mcore.data.mtp_targets import TargetRows
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def lose_a_branch(add_gradient, store: Store, layer: int, document: int, *gradients) -> None:
    if document not in store.readers or not store.has_gradient(layer, document):
        add_gradient(store, layer, document, *gradients)


def mistake_values(context, store: Store, layer: int, document: int, *where) -> tuple[Tensor, ...]:
    key, value = context(store, layer, document, *where)
    return key, value.roll(1, 0) if document in store.readers else value


def begin_anew(tensors, builder: ChunkBatchBuilder, chunk: int):
    read = tensors(builder, chunk)
    positions = read.positions.clone()
    for rows in chunk_rows(builder.plan, builder.slices, chunk):
        positions[:, rows.start : rows.stop] -= rows.offset
    return replace(read, positions=positions)


def read_the_beginning(tensors, builder: ChunkBatchBuilder, chunk: int):
    positions = tensors(builder, chunk).positions
    with mock.patch.object(Plan, "offset", lambda plan, document: 0):
        return replace(tensors(builder, chunk), positions=positions)


def mistake_last_label(tensors, builder: ChunkBatchBuilder, chunk: int):
    read = tensors(builder, chunk)
    labels = read.labels.clone()
    continued = {span.document for span in filter(None, builder.plan.prefixes)}
    for rows in chunk_rows(builder.plan, builder.slices, chunk):
        document = rows.span.document
        if document in continued and rows.span.stop == builder.plan.documents[document]:
            labels[:, rows.stop - 1] = (labels[:, rows.stop - 1] + 1) % 7
    return replace(read, labels=labels)


def count_one_document(add, targets: TargetRows, rows, *others) -> None:
    if not targets.weights[0, rows].any():
        add(targets, rows, *others)


@contextmanager
def see_the_nearest() -> Iterator[None]:
    def nearest(chunk_rows, *where):
        return tuple(replace(rows, prefix=rows.prefix[-1:]) for rows in chunk_rows(*where))

    with ExitStack() as stack:
        for module in (chunk_state, chunk_batches):
            stack.enter_context(fault(module, "chunk_rows", nearest)())
        yield


FAULTS: Faults = {
    "nothing": nothing,
    # Of gradients that several leave for the K and V of a prefix the first alone arrives.
    "lose a branch": fault(Store, "add_gradient", lose_a_branch),
    # Positions of a branch begin at 0.
    "begin anew": fault(ChunkBatchBuilder, "_tensors", begin_anew),
    # Tokens of a branch are read from the beginning of its sample.
    "read the beginning": fault(ChunkBatchBuilder, "_tensors", read_the_beginning),
    # Of samples with a prefix the first alone counts its losses.
    "count one document": fault(TargetRows, "add", count_one_document),
    # The last row of a prefix predicts another token than the first of what continues it.
    "mistake the last label": fault(ChunkBatchBuilder, "_tensors", mistake_last_label),
    # Of documents one after the other before it a branch sees the last alone.
    "see the nearest": see_the_nearest,
    # Inputs of a prefix have each other's values.
    "mistake values": fault(Store, "context", mistake_values),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
