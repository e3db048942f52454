"""Breaks documents local to a rank on purpose, another way in every batch: what a certificate must
notice.

Run inside a rank (``Trial.interfere``), as sabotage.py. No way may keep a rank from a collective
that others are in.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch

from megatron_epp.layers.attention import local
from megatron_epp.mcore.data import chunk_batches
from megatron_epp.mcore.data.chunk_batches import ChunkBatchBuilder
from megatron_epp.mcore.kinds.attention import module


def _rows_changed(change: Callable) -> AbstractContextManager:
    """``change(positions, first local row)`` of every chunk with local documents."""
    plain = ChunkBatchBuilder._tensors

    def tensors(self: ChunkBatchBuilder, chunk: int):
        found = plain(self, chunk)
        content = self.plan.chunks[chunk]
        if content.has_local:
            change(found.positions[0], self.share.spread_rows(content))
        return found

    return patch.object(ChunkBatchBuilder, "_tensors", tensors)


def lose_every_place() -> AbstractContextManager:
    """Rotary positions of local rows are all 0; by any constant more they would be right."""

    def change(positions: torch.Tensor, first: int) -> None:
        positions[first:] = 0

    return _rows_changed(change)


def take_the_other_ranks_documents() -> AbstractContextManager:
    """Tokens, positions and labels of local documents are those of the rank beside this one."""
    plain = chunk_batches.chunk_rows

    def rows(plan, slices, chunk, rank=-1):
        return plain(plan, slices, chunk, rank if rank < 0 else 1 - rank)

    inputs = ChunkBatchBuilder._inputs

    def inputs_of_the_other(self: ChunkBatchBuilder, chunk: int):
        with patch.object(chunk_batches, "chunk_rows", rows):
            yield from list(inputs(self, chunk))

    return patch.object(ChunkBatchBuilder, "_inputs", inputs_of_the_other)


def exchange_local_rows() -> AbstractContextManager:
    """All rows go through the all-to-all, those of local documents, too: what is attended to as
    spread is not what is."""

    def parts_of(ulysses, q_tHD, k_tGD, v_tGD, state):
        qkv = q_tHD, k_tGD, v_tGD
        if state.local is None or not state.tokens:
            return local.attention_parts(ulysses, *qkv, state)
        spread = local.spread_rows(state, ulysses)
        behind = (x[spread:].clone() for x in qkv)
        return (*(x[: state.tokens] for x in ulysses.to_heads(*qkv)), *behind)

    return patch.object(module, "attention_parts", parts_of)


def give_rows_back_out_of_turn() -> AbstractContextManager:
    """What attention makes of local rows is put in the place of others."""
    plain = local.attend_parts

    def attended(parts, state, ulysses, spread, of_local):
        def whole(q, k, v):
            out, again = of_local(q, k, v)
            return out.flip(0), again

        return plain(parts, state, ulysses, spread, whole)

    return patch.object(module, "attend_parts", attended)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    lose_every_place,
    take_the_other_ranks_documents,
    nullcontext,
    exchange_local_rows,
    give_rows_back_out_of_turn,
    *(nullcontext,) * 3,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
