"""Faults of multi-token prediction."""

import numpy

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.mcore.data import chunk_batches
from megatron_epp.mcore.data.mtp_targets import TargetRows
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def scale_by_the_chunk(fill, targets: TargetRows, rows, documents, sample, span, length, counts):
    _, mask = documents.targets(sample, *span)
    here = numpy.array([mask[depth:].sum() for depth in range(targets.predictions.each)])
    fill(targets, rows, documents, sample, span, length, lambda: here)


FAULTS: Faults = {
    "nothing": nothing,
    # A slice's last rows read no token of the next one.
    "roll at the end of a slice": fault(
        chunk_batches,
        "mtp_tokens",
        lambda mtp_tokens, documents, sample, span, length, depths: mtp_tokens(
            documents, sample, span, span[1], depths
        ),
    ),
    "lose targets at the end of a slice": fault(
        TargetRows,
        "fill",
        lambda fill, targets, rows, documents, sample, span, length, counts: fill(
            targets, rows, documents, sample, span, span[1], counts
        ),
    ),
    # A document's loss is as often its mean as the chunk has targets of it, at every depth.
    "scale by the chunk": fault(TargetRows, "fill", scale_by_the_chunk),
    # Each run of the repeated layer meets the first one's K and V.
    "keep one index for all runs": fault(ChunkState, "again", lambda again, state, layers: state),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
