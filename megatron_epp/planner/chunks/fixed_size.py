"""Chunks of one fixed size: long documents are sliced, tails and short ones packed."""

from collections.abc import Iterator

import numpy as np

from megatron_epp.planner.chunks.bin_packing import first_fit
from megatron_epp.planner.chunks.chunking import Chunking, assemble
from megatron_epp.planner.chunks.slicing import Rates, cut_at

LEAST_CHUNK_TOKENS = 1024
# Factor between sizes, from the context down; finer steps change little.
STEP = 2**0.5
SIZES = 12


def sizes(context: int, multiple: int) -> Iterator[int]:
    """Yield chunk sizes to try, multiples of ``multiple`` tokens, from context to about 1024."""
    seen = set()
    for power in range(SIZES):
        size = max(multiple, round(context / STEP**power / multiple) * multiple)
        if size not in seen and (power == 0 or size >= min(LEAST_CHUNK_TOKENS, context)):
            seen.add(size)
            yield size


def packed_chunks(lengths: np.ndarray, context: int, rates: Rates) -> Chunking:
    """Return chunks of at most ``context`` tokens, with unsliced documents packed first-fit.

    If the longest document has more tokens than ``context``, its length is the limit.
    """
    longest = int(lengths[0])
    uncut = cut_at(lengths, np.array([0, longest]))
    bucket, buckets = first_fit(uncut, max(context, longest))
    return assemble(uncut, bucket, buckets, rates)


def fixed_chunks(lengths: np.ndarray, size: int, rates: Rates) -> Chunking:
    """Return chunks of ``size`` tokens: slices of long documents, and packs of the rest.

    A pack holds short documents and at most one tail (the last slice of a long document).
    """
    points = np.arange(0, int(lengths[0]) + size, size)
    cuts = cut_at(lengths, points)
    bucket, buckets = first_fit(cuts, size)
    return assemble(cuts, bucket, buckets, rates)
