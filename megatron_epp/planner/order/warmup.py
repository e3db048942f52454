"""Number of forwards that a stage runs before each of its backwards, as in 1F1B.

On a stage with d stages after it, k + d + N forwards precede backward k (counted from 0), where N
is the largest number of slices of a document of the pipeline (InfiniPipe eq. 7). These numbers are
d more than on the last stage, so those of the last stage determine all.
"""

from collections.abc import Sequence

import numpy as np


def constant(sizes: np.ndarray, stages: int) -> np.ndarray:
    """Return the number [stages, chunks] of forwards before each backward of one pipeline.

    ``sizes`` [groups] contains the number of chunks of every group (sliced document or pack), in
    order. The number of chunks in flight stays constant.
    """
    count = int(sizes.sum())
    return _staged(np.arange(count) + int(sizes.max()), count, stages)


def pipelines(sizes: np.ndarray, cuts: list[int], stages: int) -> np.ndarray:
    """Return the number [stages, chunks] of forwards before each backward of several pipelines.

    Pipelines run one after another, each with its own in-flight limit. ``sizes`` [groups] contains
    the number of chunks of every group (sliced document or pack), and ``cuts`` the groups at which
    a new pipeline begins.
    """
    rows, before = [], 0
    for part in np.split(sizes, cuts):
        rows.append(constant(part, stages) + before)
        before += int(part.sum())
    return np.concatenate(rows, axis=1)


def shrinking_in_flight(
    sizes: np.ndarray, stages: int, widths: np.ndarray | None = None
) -> np.ndarray:
    """Return the number [stages, chunks] of forwards before each backward, for a falling limit.

    The in-flight limit depends on the longest remaining document. If documents are sorted longest
    first, the last stage's limit falls to 1 after the sliced documents, and memory falls with it.

    Args:
        sizes: [groups] number of chunks of every group (sliced document or pack), in order.
        stages: number of stages.
        widths: [groups] maximum number of each group's chunks in flight; default: ``sizes``.
    """
    count = int(sizes.sum())
    widths = sizes if widths is None else widths
    to_come = np.repeat(np.maximum.accumulate(widths[::-1])[::-1], sizes)
    last = np.maximum.accumulate(np.arange(count) + to_come)
    return _staged(last, count, stages)


def filling_forwards(sizes: np.ndarray, place: Sequence[int]) -> np.ndarray:
    """Return the number [ranks] of warm-up forwards if ranks have several stages.

    On each rank, these are the forwards of the largest group on all stages of the rank, plus two
    for every stage of later ranks.

    Args:
        sizes: [groups] number of chunks of every group (sliced document or pack).
        place: rank of every stage.
    """
    own = np.bincount(place)
    ranks = len(own)
    after = (ranks - 1 - np.arange(ranks)) * (len(place) // ranks)
    return own * int(sizes.max()) + 2 * after


def placed_window(sizes: np.ndarray, place: Sequence[int], widths: np.ndarray) -> np.ndarray:
    """Return the number [ranks, backwards] of a rank's forwards before each of its backwards.

    Forwards and backwards of all stages of the rank count. Arguments are those of
    :func:`filling_forwards` and :func:`shrinking_in_flight`.
    """
    backward = np.arange(int(sizes.sum()) * int(np.bincount(place).max()))
    return backward[None] + filling_forwards(widths, place)[:, None]


def interleaved_warm_up(ranks: int, stages: int) -> np.ndarray:
    """Return the number [ranks] of warm-up forwards of Megatron's interleaved schedule."""
    return 2 * (ranks - 1 - np.arange(ranks)) + stages - ranks


def group_by_group(sizes: np.ndarray, stages: int) -> np.ndarray:
    """Return the least number [stages, chunks] of forwards before each backward.

    The number follows from dependencies: all forwards of a group (sliced document or pack) must
    precede the group's backwards. ``sizes`` [groups] contains the number of chunks of every group.
    """
    ends = np.repeat(np.cumsum(sizes), sizes)
    return np.repeat(ends[None], stages, axis=0)


def _staged(last: np.ndarray, count: int, stages: int) -> np.ndarray:
    """Return all in-flight limits [stages, chunks], from the last stage's ``last`` [chunks]."""
    after = np.arange(stages)[::-1]
    return np.minimum(count, last[None] + after[:, None])
