"""Recompute choices for a strict order, from the diagonal program."""

from collections.abc import Iterable

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, KEEP, SELECTIVE
from megatron_epp.planner.order.problem import Counts, ScheduleProblem
from megatron_epp.planner.recompute import ilp

WHOLE_LAYERS = KEEP + FULL


def ladder(cost: Cost, loads: Loads, letters: Iterable[str] = SELECTIVE) -> str:
    """The letters worth using, from keeping all to recomputing all: each step frees its bytes at
    a lower price than the next one (the lower convex hull of seconds over bytes)."""
    points = [(0.0, 0.0, KEEP)]
    for letter in (*letters, FULL):
        freed = float(np.sum(cost.saved_bytes(KEEP, loads) - cost.saved_bytes(letter, loads)))
        seconds = float(np.sum(cost.recompute_seconds(letter, loads)))
        if freed > 0:
            points.append((freed, seconds, letter))
    points.sort(key=lambda point: (point[0], point[1]))
    hull: list[tuple[float, float, str]] = []
    for freed, seconds, letter in points:
        while hull and hull[-1][1] >= seconds and hull[-1][0] <= freed and hull[-1][2] != KEEP:
            hull.pop()  # frees less and takes longer
        while len(hull) >= 2 and _price(hull[-2], hull[-1]) >= _price(
            hull[-2], (freed, seconds, letter)
        ):
            hull.pop()
        if not hull or freed > hull[-1][0]:
            hull.append((freed, seconds, letter))
    return "".join(letter for _, _, letter in hull)


def _price(low: tuple[float, float, str], high: tuple[float, float, str]) -> float:
    return (high[1] - low[1]) / max(high[0] - low[0], 1e-9)


def freed_bytes(cost: Cost, loads: Loads, steps: str) -> np.ndarray:
    """[steps, stages, chunks]: what one more layer on each step of a ladder frees from F to B."""
    saved = np.stack([cost.saved_bytes(letter, loads) for letter in steps])
    per_step = saved[:-1] - saved[1:]
    return np.ascontiguousarray(np.repeat(per_step[:, None], cost.stages, axis=1))


def diagonal_counts(
    solver: ilp.Solver,
    cost: Cost,
    loads: Loads,
    kept: ScheduleProblem,
    least: np.ndarray,
    *,
    integer: bool,
    steps: str = WHOLE_LAYERS,
    budget_bytes: np.ndarray | None = None,
    layers: np.ndarray | None = None,
) -> Counts | None:
    """The cheapest recompute that fits under the order ``least``; None where none does.

    kept           the work where nothing is recomputed
    steps          letters from KEEP up (:func:`ladder`)
    budget_bytes   per stage beside residents; default: all of it
    layers         [stages, chunks] that are left to recompute, the others being offloaded; default:
                   all of each stage
    """
    budget = kept.budget_bytes if budget_bytes is None else budget_bytes
    freed = freed_bytes(cost, loads, steps)
    if layers is None:
        # A slot reaches through all stages; its layers are at most those of the smallest.
        every = np.tile(np.array(cost.layers)[:, None], (1, kept.chunks))
        most = ilp.reduce_diagonals(np.nanmin, every, kept.backward_order)
    else:
        # Of a slot's layers a chunk recomputes as many as it has left. What that frees grows to
        # there and no further; the program reckons with the line below, which is exact at both
        # ends, so that it finds something wherever recomputing all that is left would do.
        most = ilp.reduce_diagonals(np.nanmax, layers, kept.backward_order)
        reach = ilp.broadcast_diagonals(most, kept.backward_order, cost.stages)
        freed = freed * (layers / np.maximum(reach, 1))
    total = len(most)
    weights = None
    if len(steps) > 2:
        seconds = [float(cost.recompute_seconds(letter, loads).mean()) for letter in steps]
        price = np.maximum(np.diff(seconds), 1e-9 * max(seconds))
        weights = np.repeat(price / price.max(), total)
    found = ilp.solve_order(
        solver,
        least,
        kept.backward_order,
        kept.ops.moved_bytes,
        freed,
        budget,
        np.tile(most, len(steps) - 1),
        weights,
        integer=integer,
    )
    if found is None:
        return None
    # A layer on a step has taken those below it.
    taken = np.maximum.accumulate(found[::-1])[::-1]
    grids = [ilp.broadcast_diagonals(step, kept.backward_order, cost.stages) for step in taken]
    if layers is not None:
        grids = [np.minimum(grid, layers) for grid in grids]
    counts = {}
    for number, letter in enumerate(steps[1:]):
        above = grids[number + 1] if number + 1 < len(grids) else 0
        grid = (grids[number] - above).astype(np.float64)
        if grid.any():
            counts[letter] = grid
    return counts
