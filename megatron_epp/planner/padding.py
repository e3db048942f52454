"""Padding of chunks' rows on GPUs."""

from collections.abc import Sequence

# Rows of a rank are padded to multiples of GPU_ROWS, or of FEWER_GPU_ROWS if GPU_ROWS pads too
# much.
GPU_ROWS, FEWER_GPU_ROWS = 16, 4
MOST_PADDING = 0.01  # of a batch's tokens
MOST_ROWS = 1024  # largest multiple that a user may request
CHUNKS_PER_STAGE = 4  # typical for plans of a pipeline


def gpu_row_multiple(
    batches: Sequence[Sequence[int]], stages: int, replicas: int, ranks: int
) -> int:
    """Return the row multiple, to which a rank rounds up its rows of a chunk on GPUs.

    On average, this padding adds half of the multiple to a rank's rows.

    Args:
        batches: document lengths of some batches; () if unknown.
        stages: number of stages.
        replicas: number of replicas.
        ranks: number of ranks of a stage over which the rows of a chunk are sharded.
    """
    if not batches:  # the lengths are unknown
        return GPU_ROWS
    tokens = sum(map(sum, batches)) / (len(batches) * replicas)
    padding = CHUNKS_PER_STAGE * stages * GPU_ROWS * ranks / 2
    return GPU_ROWS if padding <= MOST_PADDING * tokens else FEWER_GPU_ROWS
