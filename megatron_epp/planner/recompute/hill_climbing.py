"""Recompute improved step by step: given back where memory has slack, shifted where it pays.

The diagonal program speaks of the window law; a list schedule needs less here and more there. What
is tried is judged by playing it.
"""

from collections.abc import Callable, Iterator

import numpy as np

from megatron_epp.cost.layer_kinds import Choice, Counts

# Chosen by hand, as are those of epp.search.GRID.
SCALES = (0.0, 0.25, 0.5, 0.75, 0.9)
UNDO_STEPS = (4, 2, 1)  # layers given back on a diagonal at once


def trimmed[T](
    best: T,
    counts_of: Callable[[T], Counts],
    play: Callable[[Counts], T | None],
    rank: Callable[[T], tuple[float, float]],
    slots: np.ndarray,
) -> T:
    """The best that a sweep over diagonals finds from ``best``: first all scaled at once, then
    some layers of one diagonal at a time, those that recompute most first.

    play    what some counts lead to; None where the search's budget is spent
    slots   [stages, chunks] the diagonal that each chunk lies on
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
