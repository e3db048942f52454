"""Static recompute: the same number of layers for every chunk and stage, just enough to fit."""

from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.problem import Counts, loads_of, problem_of


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A draft and what playing it takes.

    over_bytes   above the budget, 0 where it fits
    cost         of the machine it was played on: its layers may be moved (lever `uneven`)
    """

    seconds: float
    over_bytes: float
    draft: Draft
    cost: Cost

    @property
    def rank(self) -> tuple[float, float]:
        """Those that fit first, then the fastest."""
        return self.over_bytes, self.seconds


def better(best: ScoredDraft | None, bound_seconds: float, below: float) -> bool:
    """Whether a plan that takes at least ``bound_seconds`` could be the best, and of interest."""
    return bound_seconds < below and (
        best is None or best.over_bytes > 0 or bound_seconds < best.seconds
    )


def strict(least: np.ndarray) -> Policy:
    """Exactly ``least`` forwards before each backward."""
    return Policy(least, least, least)


def uniform_draft(
    batch: SortedBatch,
    chunking: Chunking,
    least: np.ndarray,
    cost: Cost,
    options: Options,
    note: str = "",
) -> ScoredDraft:
    """The strict order ``least`` with the fewest recomputed layers that fit, alike on all stages.

    Where nothing fits, everything is recomputed, and the plan says that it does not fit.
    """
    loads = loads_of(chunking, batch.lengths, options.multiple)

    def play(layers: int) -> tuple[Counts, Schedule]:
        grid = np.minimum(np.array(cost.layout.layers), layers)[:, None]
        counts = cost.layout.kinds.first(FULL, np.tile(grid, (1, chunking.count)))
        return counts, list_schedule(problem_of(cost, chunking, loads, counts), strict(least))

    low, high = 0, max(cost.layout.layers)  # the fewest that fit lie in low..high
    counts, schedule = play(0)
    if schedule.over_bytes > 0:
        low = 1
        while low < high:
            middle = (low + high) // 2
            if play(middle)[1].over_bytes > 0:
                low = middle + 1
            else:
                high = middle
        counts, schedule = play(low)
    said = f"{note}, recompute {low} layers" if low else note
    draft = Draft(chunking, counts, schedule.kinds, schedule.chunks, note=said)
    return ScoredDraft(schedule.seconds, schedule.over_bytes, draft, cost)
