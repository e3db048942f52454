"""Recompute choices for a strict order, from the diagonal program."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, KEEP
from megatron_epp.planner import diagonal
from megatron_epp.planner.work import Counts, Work


def freed_bytes(cost: Cost, loads: Loads, letter: str = FULL) -> np.ndarray:
    """[stages, chunks]: what one more layer with ``letter`` frees from F to B."""
    row = cost.saved_bytes(KEEP, loads) - cost.saved_bytes(letter, loads)
    return np.tile(row, (cost.stages, 1))


def diagonal_counts(
    cost: Cost,
    loads: Loads,
    kept: Work,
    least: np.ndarray,
    *,
    integer: bool,
    budget_bytes: np.ndarray | None = None,
) -> Counts | None:
    """The fewest layers to recompute in full under the order ``least``; None where none suffice.

    kept           the work where nothing is recomputed
    budget_bytes   per stage beside residents; default: all of it
    """
    budget = kept.budget_bytes if budget_bytes is None else budget_bytes
    rows = diagonal.rows_of(
        least, kept.backward_order, kept.whole_bytes, freed_bytes(cost, loads), budget
    )
    layers = np.array(cost.layers)
    # A slot reaches from stage s (slot - d) to all stages; its layers are those of the fewest.
    most = np.full(rows.slots, layers.max(), dtype=np.int64)
    if layers.min() < layers.max():
        slots = np.arange(rows.slots)
        for stage, count in enumerate(layers):
            behind = cost.stages - 1 - stage
            here = (slots >= behind) & (slots < behind + kept.chunks)
            most[here] = np.minimum(most[here], count)
    found = diagonal.solve(rows, most, integer=integer)
    if found is None:
        return None
    grid = diagonal.spread(found, kept.backward_order, cost.stages)
    return {FULL: grid.astype(np.float64)} if grid.any() else {}
