"""How many forwards a stage runs before each of its backwards: 1F1B's window law.

On a stage with d stages behind it, backward k follows k + d + N forwards, N being the chunks of
the longest document of the pipeline (InfiniPipe eq. 7): d more than on the last stage, so one row
for the last stage tells all.
"""

from collections.abc import Sequence

import numpy as np


def constant(sizes: np.ndarray, stages: int) -> np.ndarray:
    """One pipeline, one window: [stages, chunks] forwards before each backward.

    sizes   chunks of every group, in order
    """
    count = int(sizes.sum())
    return _staged(np.arange(count) + int(sizes.max()), count, stages)


def pipelines(sizes: np.ndarray, cuts: list[int], stages: int) -> np.ndarray:
    """Several pipelines one after another, each with its own window; ``cuts`` are group numbers
    at which a new pipeline begins."""
    rows, before = [], 0
    for part in np.split(sizes, cuts):
        rows.append(constant(part, stages) + before)
        before += int(part.sum())
    return np.concatenate(rows, axis=1)


def shrinking_in_flight(sizes: np.ndarray, stages: int) -> np.ndarray:
    """One pipeline whose window is that of the longest document still to come.

    Where documents come longest first, the window falls to 1 as the split documents run out, and
    memory with it; no barrier is needed.
    """
    count = int(sizes.sum())
    to_come = np.repeat(np.maximum.accumulate(sizes[::-1])[::-1], sizes)
    last = np.maximum.accumulate(np.arange(count) + to_come)
    return _staged(last, count, stages)


def filling_forwards(sizes: np.ndarray, place: Sequence[int]) -> np.ndarray:
    """Return the forwards that fill a pipeline whose ranks have several stages, [ranks]: those of
    one group on all stages of a rank, and twice what is in flight to the ranks after it.

    Args:
        sizes: chunks of every group
        place: the rank of every stage
    """
    own = np.bincount(place)
    ranks = len(own)
    after = (ranks - 1 - np.arange(ranks)) * (len(place) // ranks)
    return own * int(sizes.max()) + 2 * after


def placed_window(sizes: np.ndarray, place: Sequence[int]) -> np.ndarray:
    """Return the forwards of all stages of a rank before each backward of them,
    [ranks, backwards]; arguments as in :func:`filling_forwards`."""
    backward = np.arange(int(sizes.sum()) * int(np.bincount(place).max()))
    return backward[None] + filling_forwards(sizes, place)[:, None]


def interleaved_warm_up(ranks: int, stages: int) -> np.ndarray:
    """Return the forwards before the first pair of a forward and a backward, [ranks], as Megatron's
    interleaved schedule has them."""
    return 2 * (ranks - 1 - np.arange(ranks)) + stages - ranks


def group_by_group(sizes: np.ndarray, stages: int) -> np.ndarray:
    """The least that dependencies ask for: a group's forwards before its first backward."""
    ends = np.repeat(np.cumsum(sizes), sizes)
    return np.repeat(ends[None], stages, axis=0)


def _staged(last: np.ndarray, count: int, stages: int) -> np.ndarray:
    """``last``: the last stage's row."""
    after = np.arange(stages)[::-1]
    return np.minimum(count, last[None] + after[:, None])
