"""Hill climbing over recompute counts: less recompute where memory has slack.

InfiniPipe's diagonal program assumes a fixed in-flight limit. A list schedule sometimes has more or
fewer forwards in flight. Simulation decides whether a change of recompute is an improvement.
"""

from collections.abc import Callable, Iterator

import numpy as np

from megatron_epp.cost.layer_kinds import Choice, Counts

# Chosen by hand, like epp.search.GRID.
SCALES = (0.0, 0.25, 0.5, 0.75, 0.9)
UNDO_STEPS = (4, 2, 1)  # numbers of layers per diagonal to stop recomputing at once


def trimmed[T](
    best: T,
    counts_of: Callable[[T], Counts],
    play: Callable[[Counts], T | None],
    rank: Callable[[T], tuple[float, float]],
    slots: np.ndarray,
) -> T:
    """Return the best candidate found by reducing the recompute of ``best``.

    First, all recompute counts are scaled. Then the counts of one diagonal of stages and chunks at
    a time are reduced, in descending order of recomputed layers.

    Args:
        best: candidate to start from.
        counts_of: function that returns the recompute counts of a candidate.
        play: function that simulates given counts and returns a candidate; None if no effort is
            left.
        rank: function that returns the sort key of a candidate.
        slots: [stages, chunks] index of the diagonal of each stage and chunk.
    """
    start = counts_of(best)
    for counts in (_scaled(start, scale) for scale in SCALES):
        tried = play(counts)
        if tried is None:
            return best
        if rank(tried) < rank(best):
            best = tried
    for step in UNDO_STEPS:
        for mode, slot in list(_places(counts_of(best), slots)):
            counts = counts_of(best)
            grid = counts[mode]
            less = np.where(slots == slot, np.maximum(grid - step, 0.0), grid)
            tried = play({**counts, mode: less})
            if tried is None:
                return best
            if rank(tried) < rank(best):
                best = tried
    return best


def _scaled(counts: Counts, scale: float) -> Counts:
    return {mode: np.ceil(grid * scale) for mode, grid in counts.items()}


def _places(counts: Counts, slots: np.ndarray) -> Iterator[tuple[Choice, int]]:
    for mode, grid in counts.items():
        weight = np.bincount(slots.ravel(), weights=grid.ravel())
        order = np.argsort(-weight, kind="stable")
        yield from ((mode, int(slot)) for slot in order if weight[slot] > 0)
