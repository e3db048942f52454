"""Breaks the prediction of further tokens on purpose, another way in every batch: what a
certificate must notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import numpy

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.mcore.data import chunk_batches
from megatron_epp.mcore.data.mtp_targets import TargetRows, mtp_tokens


def roll_at_the_end_of_a_slice() -> AbstractContextManager:
    """A slice's last rows read no token of the next one."""

    def rolled(documents, sample, span, length, depths):
        return mtp_tokens(documents, sample, span, span[1], depths)

    return patch.object(chunk_batches, "mtp_tokens", rolled)


def lose_targets_at_the_end_of_a_slice() -> AbstractContextManager:
    plain = TargetRows.fill

    def fill(self, rows, documents, sample, span, length, counts):
        plain(self, rows, documents, sample, span, span[1], counts)

    return patch.object(TargetRows, "fill", fill)


def scale_by_the_chunk() -> AbstractContextManager:
    """A document's loss is as often its mean as the chunk has targets of it, at every depth."""
    plain = TargetRows.fill

    def fill(self, rows, documents, sample, span, length, counts):
        _, mask = documents.targets(sample, *span)
        here = numpy.array([mask[depth:].sum() for depth in range(self.predictions.each)])
        plain(self, rows, documents, sample, span, length, lambda: here)

    return patch.object(TargetRows, "fill", fill)


def keep_one_index_for_all_runs() -> AbstractContextManager:
    """Each run of the repeated layer meets the first one's K and V."""
    return patch.object(ChunkState, "again", lambda self, layers: self)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    roll_at_the_end_of_a_slice,
    lose_targets_at_the_end_of_a_slice,
    scale_by_the_chunk,
    keep_one_index_for_all_runs,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
