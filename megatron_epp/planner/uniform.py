"""Static recompute: the same number of layers for every chunk and stage, just enough to fit."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL
from megatron_epp.planner.chunking import Chunking
from megatron_epp.planner.finish import Batch, Draft
from megatron_epp.planner.listing import Listed, Policy, list_schedule
from megatron_epp.planner.options import Options
from megatron_epp.planner.work import Counts, loads_of, work_of


def strict(least: np.ndarray) -> Policy:
    """Exactly ``least`` forwards before each backward."""
    return Policy(least, least, least)


def uniform_draft(
    batch: Batch,
    chunking: Chunking,
    least: np.ndarray,
    cost: Cost,
    options: Options,
    note: str = "",
    pipelines: int = 1,
) -> Draft:
    """The strict order ``least`` with the fewest recomputed layers that fit, alike on all stages.

    Where nothing fits, everything is recomputed, and the plan says that it does not fit.
    """
    loads = loads_of(chunking, batch.lengths, options.multiple)

    def play(layers: int) -> tuple[Counts, Listed]:
        grid = np.minimum(np.array(cost.layers), layers)[:, None]
        counts = {FULL: np.tile(grid, (1, chunking.count))} if layers else {}
        return counts, list_schedule(work_of(cost, chunking, loads, counts), strict(least))

    low, high = 0, max(cost.layers)  # the fewest that fit lie in low..high
    counts, listed = play(0)
    if listed.over_bytes > 0:
        low = 1
        while low < high:
            middle = (low + high) // 2
            if play(middle)[1].over_bytes > 0:
                low = middle + 1
            else:
                high = middle
        counts, listed = play(low)
    said = f"{note}, recompute {low} layers" if low else note
    return Draft(chunking, counts, listed.kinds, listed.chunks, pipelines=pipelines, note=said)
