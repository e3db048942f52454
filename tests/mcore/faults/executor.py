"""Faults of the executor."""

import torch
import torch.distributed as dist

from megatron_epp.layers.attention import cpu
from megatron_epp.mcore.data.chunk_batches import ChunkBatch, ChunkBatchBuilder
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Fault, Faults, fault, in_turn, nothing

HOST_BLOCK = torch.empty(2**22, dtype=torch.uint8)


def in_batches(change) -> Fault:
    """Return a fault that makes ``change`` to every chunk's batch."""

    def batch(original, *arguments):
        made = original(*arguments)
        change(made)
        return made

    return fault(ChunkBatchBuilder, "batch", batch)


def shift_positions(batch: ChunkBatch) -> None:
    for rows in batch.params.state.rows:
        if rows.span.start > 0:
            batch.positions[0, rows.start : rows.stop] += 1


def lose_border_labels(batch: ChunkBatch) -> None:
    for rows in batch.params.state.rows:
        if rows.cut and not rows.last and batch.loss_mask is not None:
            batch.loss_mask[0, rows.stop - 1] = 0


def mistake_border_labels(batch: ChunkBatch) -> None:
    for rows in batch.params.state.rows:
        if rows.cut and not rows.last and batch.labels is not None:
            batch.labels[0, rows.stop - 1] = batch.labels[0, rows.start]
            batch.loss_mask[0, rows.stop - 1] = 1


def shift_masks(batch: ChunkBatch) -> None:
    if batch.loss_mask is not None:
        batch.loss_mask[0] = batch.loss_mask[0].roll(1)


def append_again(append, store: Store, layer: int, document: int, start: int, key, value):
    kept = store._kept.get((layer, document))
    filled = start if kept is None else max(start, kept.filled)
    return append(store, layer, document, filled, key, value)


FAULTS: Faults = {
    "nothing": nothing,
    # What later slices leave for the K and V of earlier ones never arrives.
    "drop returned gradients": fault(
        Store, "gradient", lambda gradient, *where: tuple(map(torch.zeros_like, gradient(*where)))
    ),
    # A slice's positions are one too far.
    "shift positions": in_batches(shift_positions),
    # The last label of a slice lies behind the cut: it counts as masked.
    "lose border labels": in_batches(lose_border_labels),
    # The last input of a slice predicts the slice's own first one.
    "mistake border labels": in_batches(mistake_border_labels),
    # A recomputed layer appends its K and V a second time.
    "append again": fault(Store, "append", append_again),
    # Scores over the kept context are scaled as if heads were larger than they are.
    "scale wrongly": fault(
        cpu,
        "attend",
        lambda attend, q, k, v, causal, scale: attend(
            q, k, v, causal, scale if causal else 0.9 * scale
        ),
    ),
    # Every chunk begins with a barrier that nobody planned.
    "meet in between": in_batches(lambda batch: dist.barrier()),
    # What an iteration kept is still there when it ends.
    "forget to free": fault(Store, "release", lambda release, *where: None),
    # A layer is laid where another one still lies that has not come back.
    "reuse host memory": fault(
        HostStore, "allocate", lambda allocate, *size: [HOST_BLOCK] if allocate(*size) else None
    ),
    # What the plan offloads stays on the device.
    "leave layers where they are": fault(HostStore, "allocate", lambda allocate, *size: None),
    # The host has memory for one layer, whatever the plan says.
    "lay one layer aside at a time": fault(
        HostStore,
        "allocate",
        lambda allocate, store, nbytes: None if store.memory.bytes else allocate(store, nbytes),
    ),
    # Every row's label counts as the next row's should.
    "shift masks": in_batches(shift_masks),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
