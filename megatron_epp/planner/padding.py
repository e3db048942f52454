"""Padding of the rows (tokens) of chunks on GPUs."""

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
    """Return the number m such that a GPU pads its rows of each chunk to a multiple of m.

    A row is the hidden state of one token. On average, a GPU gets m / 2 rows of padding per chunk.

    Args:
        batches: document lengths of some global batches, in tokens; () if unknown.
        stages: number of pipeline ranks.
        replicas: number of replicas.
        ranks: number of GPUs of a stage over which the rows of a chunk are sharded.
    """
    if not batches:  # the lengths are unknown
        return GPU_ROWS
    tokens = sum(map(sum, batches)) / (len(batches) * replicas)
    padding = CHUNKS_PER_STAGE * stages * GPU_ROWS * ranks / 2
    return GPU_ROWS if padding <= MOST_PADDING * tokens else FEWER_GPU_ROWS
