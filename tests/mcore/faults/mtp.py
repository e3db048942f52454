"""Faults of multi-token prediction."""

import numpy

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.mcore.data import chunk_batches
from megatron_epp.mcore.data.mtp_targets import TargetRows
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def scale_by_the_chunk(add, targets: TargetRows, rows, documents, sample, span, counts):
    _, mask = documents.targets(sample.number, *span)
    here = numpy.array([mask[depth:].sum() for depth in range(targets.predictions.each)])
    add(targets, rows, documents, sample, span, lambda: here)


FAULTS: Faults = {
    "nothing": nothing,
    # A slice's last rows read no token of the next one.
    "roll at the end of a slice": fault(
        chunk_batches,
        "mtp_tokens",
        lambda mtp_tokens, documents, sample, span, depths: mtp_tokens(
            documents, sample._replace(length=span[1]), span, depths
        ),
    ),
    "lose targets at the end of a slice": fault(
        TargetRows,
        "add",
        lambda add, targets, rows, documents, sample, span, counts: add(
            targets, rows, documents, sample._replace(length=span[1]), span, counts
        ),
    ),
    # A document's loss is as often its mean as the chunk has targets of it, at every depth.
    "scale by the chunk": fault(TargetRows, "add", scale_by_the_chunk),
    # Each run of the repeated layer meets the first one's K and V.
    "keep one index for all runs": fault(ChunkState, "again", lambda again, state, layers: state),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
