"""In-flight limit of 1F1B: the forwards that a stage runs before each of its backwards.

On a stage with d stages after it, backward k follows k + d + N forwards. N is the number of chunks
of the pipeline's longest document (InfiniPipe eq. 7). This is d more than on the last stage, so the
row of the last stage determines all.
"""

from collections.abc import Sequence

import numpy as np


def constant(sizes: np.ndarray, stages: int) -> np.ndarray:
    """Return [stages, chunks] forwards before each backward of one pipeline.

    ``sizes`` are the numbers of chunks of every group, in order. The limit is constant.
    """
    count = int(sizes.sum())
    return _staged(np.arange(count) + int(sizes.max()), count, stages)


def pipelines(sizes: np.ndarray, cuts: list[int], stages: int) -> np.ndarray:
    """Return [stages, chunks] forwards before each backward, for pipelines that run one by one.

    Each has its own limit; ``cuts`` are the groups with which a new pipeline begins.
    """
    rows, before = [], 0
    for part in np.split(sizes, cuts):
        rows.append(constant(part, stages) + before)
        before += int(part.sum())
    return np.concatenate(rows, axis=1)


def shrinking_in_flight(sizes: np.ndarray, stages: int) -> np.ndarray:
    """Return [stages, chunks] forwards before each backward, by the longest document still to come.

    If documents come longest first, the limit falls to 1 when the sliced documents run out, and
    memory with it. No barrier is needed.
    """
    count = int(sizes.sum())
    to_come = np.repeat(np.maximum.accumulate(sizes[::-1])[::-1], sizes)
    last = np.maximum.accumulate(np.arange(count) + to_come)
    return _staged(last, count, stages)


def filling_forwards(sizes: np.ndarray, place: Sequence[int]) -> np.ndarray:
    """Return [ranks] forwards that fill a pipeline whose ranks have several stages.

    These are one group's forwards on all stages of a rank, and twice those in flight to later
    ranks.

    Args:
        sizes: number of chunks of every group.
        place: rank of every stage.
    """
    own = np.bincount(place)
    ranks = len(own)
    after = (ranks - 1 - np.arange(ranks)) * (len(place) // ranks)
    return own * int(sizes.max()) + 2 * after


def placed_window(sizes: np.ndarray, place: Sequence[int]) -> np.ndarray:
    """Return [ranks, backwards] forwards of all stages of a rank before each of their backwards.

    Arguments are those of :func:`filling_forwards`.
    """
    backward = np.arange(int(sizes.sum()) * int(np.bincount(place).max()))
    return backward[None] + filling_forwards(sizes, place)[:, None]


def interleaved_warm_up(ranks: int, stages: int) -> np.ndarray:
    """Return [ranks] forwards before the first F-B pair of Megatron's interleaved schedule."""
    return 2 * (ranks - 1 - np.arange(ranks)) + stages - ranks


def group_by_group(sizes: np.ndarray, stages: int) -> np.ndarray:
    """Return the least forwards that dependencies require: a group's before its backwards."""
    ends = np.repeat(np.cumsum(sizes), sizes)
    return np.repeat(ends[None], stages, axis=0)


def _staged(last: np.ndarray, count: int, stages: int) -> np.ndarray:
    """Return the rows of all stages from the row ``last`` of the last stage."""
    after = np.arange(stages)[::-1]
    return np.minimum(count, last[None] + after[:, None])
