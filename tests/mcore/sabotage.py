"""Breaks the executor on purpose, another way in every batch: what a certificate must notice.

Run inside a rank (``Trial.interfere``): ``around(number)`` surrounds the computation of a batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_epp.layers.attention import cpu
from megatron_epp.mcore.data.chunk_batches import ChunkBatch, ChunkBatchBuilder
from megatron_epp.runtime.host_store import HostStore
from megatron_epp.runtime.kv_store import Store


def drop_returned_gradients() -> AbstractContextManager:
    """What later slices leave for the K and V of earlier ones never arrives."""
    plain = Store.gradient

    def nothing(self: Store, *where: int) -> tuple[torch.Tensor, torch.Tensor]:
        key_grad, value_grad = plain(self, *where)
        return torch.zeros_like(key_grad), torch.zeros_like(value_grad)

    return patch.object(Store, "gradient", nothing)


def _changed_batch(change: Callable[[ChunkBatch], None]) -> AbstractContextManager:
    plain = ChunkBatchBuilder.batch

    def batch(self: ChunkBatchBuilder, chunk: int, store: Store, training: bool) -> ChunkBatch:
        made = plain(self, chunk, store, training)
        change(made)
        return made

    return patch.object(ChunkBatchBuilder, "batch", batch)


def shift_positions() -> AbstractContextManager:
    """A slice's positions are one too far."""

    def shift(batch: ChunkBatch) -> None:
        for rows in batch.params.state.rows:
            if rows.span.start > 0:
                batch.positions[0, rows.start : rows.stop] += 1

    return _changed_batch(shift)


def lose_border_labels() -> AbstractContextManager:
    """The last label of a slice lies behind the cut: it counts as masked."""

    def lose(batch: ChunkBatch) -> None:
        for rows in batch.params.state.rows:
            if rows.cut and not rows.last and batch.loss_mask is not None:
                batch.loss_mask[0, rows.stop - 1] = 0

    return _changed_batch(lose)


def mistake_border_labels() -> AbstractContextManager:
    """The last input of a slice predicts the slice's own first one."""

    def mistake(batch: ChunkBatch) -> None:
        for rows in batch.params.state.rows:
            if rows.cut and not rows.last and batch.labels is not None:
                batch.labels[0, rows.stop - 1] = batch.labels[0, rows.start]
                batch.loss_mask[0, rows.stop - 1] = 1

    return _changed_batch(mistake)


def shift_masks() -> AbstractContextManager:
    """Every row's label counts as the next row's should."""

    def shift(batch: ChunkBatch) -> None:
        if batch.loss_mask is not None:
            batch.loss_mask[0] = batch.loss_mask[0].roll(1)

    return _changed_batch(shift)


def append_again() -> AbstractContextManager:
    """A recomputed layer appends its K and V a second time."""
    plain = Store.append

    def append(self: Store, layer: int, document: int, start: int, key, value) -> None:
        kept = self._kept.get((layer, document))
        if kept is None or kept.filled <= start:
            return plain(self, layer, document, start, key, value)
        return plain(self, layer, document, kept.filled, key, value)

    return patch.object(Store, "append", append)


def scale_wrongly() -> AbstractContextManager:
    """Scores over the kept context are scaled as if heads were larger than they are."""
    plain = cpu.attend

    def attend(q, k, v, causal: bool, scale: float):
        return plain(q, k, v, causal, scale if causal else 0.9 * scale)

    return patch.object(cpu, "attend", attend)


def meet_in_between() -> AbstractContextManager:
    """Every chunk begins with a barrier that nobody planned."""
    return _changed_batch(lambda batch: dist.barrier())


def reuse_host_memory() -> AbstractContextManager:
    """A layer is laid where another one still lies that has not come back."""
    plain, block = HostStore.allocate, torch.empty(2**22, dtype=torch.uint8)

    def take(self: HostStore, nbytes: int) -> list[torch.Tensor] | None:
        return [block] if plain(self, nbytes) else None

    return patch.object(HostStore, "allocate", take)


def leave_layers_where_they_are() -> AbstractContextManager:
    """What the plan offloads stays on the device."""
    return patch.object(HostStore, "allocate", lambda self, nbytes: None)


def lay_one_layer_aside_at_a_time() -> AbstractContextManager:
    """The host has room for one layer, whatever the plan says."""
    plain = HostStore.allocate

    def take(self: HostStore, nbytes: int) -> list[torch.Tensor] | None:
        return None if self.bytes else plain(self, nbytes)

    return patch.object(HostStore, "allocate", take)


def forget_to_free() -> AbstractContextManager:
    """What an iteration kept is still there when it ends."""
    return patch.object(Store, "release", lambda self, layer, document: None)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    drop_returned_gradients,
    shift_positions,
    lose_border_labels,
    mistake_border_labels,
    append_again,
    scale_wrongly,
    meet_in_between,
    forget_to_free,
    reuse_host_memory,
    leave_layers_where_they_are,
    lay_one_layer_aside_at_a_time,
    shift_masks,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number % len(WAYS)]()
