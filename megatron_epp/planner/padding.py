"""Rows that chunks are padded to on GPUs."""

from collections.abc import Sequence

# Rows of a rank come in multiples of the first, or of the second where that pads too much.
GPU_ROWS, FEWER_GPU_ROWS = 16, 4
MOST_PADDING = 0.01  # of a batch's tokens
MOST_ROWS = 1024  # that a user may ask for
CHUNKS_PER_STAGE = 4  # that plans of a pipeline mostly have


def gpu_row_multiple(
    batches: Sequence[Sequence[int]], stages: int, replicas: int, ranks: int
) -> int:
    """Return the multiple that the rows of a rank come in on GPUs, for batches of these lengths.

    ``ranks``: of a stage of one replica, over which the rows of a chunk are sharded. A chunk is
    padded by half a multiple on average.
    """
    if not batches:  # of lengths that are not known
        return GPU_ROWS
    tokens = sum(map(sum, batches)) / (len(batches) * replicas)
    padding = CHUNKS_PER_STAGE * stages * GPU_ROWS * ranks / 2
    return GPU_ROWS if padding <= MOST_PADDING * tokens else FEWER_GPU_ROWS
