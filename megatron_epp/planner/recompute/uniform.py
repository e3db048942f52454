"""Static recompute: the same number of layers for every chunk and stage, just enough to fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL, OFFLOAD
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.lower_bound import work_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.policies import warm_up_policies
from megatron_epp.planner.order.problem import ChunkProblems, Counts, loads_of
from megatron_epp.planner.order.replay import replayed

NotedPolicy = tuple[Policy | Schedule, str]  # a policy, or an order; and a text on it


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


def one_f_one_b(least: np.ndarray, sizes: np.ndarray, cost: Cost) -> list[NotedPolicy]:
    """Return orders of 1F1B for groups of ``sizes`` chunks.

    The window law ``least``, or, where ranks have several stages, shorter and longer warm-ups.
    """
    if cost.layout.place:
        return list(warm_up_policies(cost.layout.place, sizes, (False,)))
    return [(strict(least), "")]


def best_schedule(
    problems: ChunkProblems, counts: Counts, policies: Sequence[NotedPolicy]
) -> tuple[Schedule, str]:
    """Play ``policies``; return the best schedule, and the text on its policy."""
    work = problems.of(counts)
    played = (
        (replayed(work, how) if isinstance(how, Schedule) else list_schedule(work, how), said)
        for how, said in policies
    )
    return min(played, key=lambda each: (each[0].over_bytes, each[0].seconds))


def scored_draft(
    chunking: Chunking, counts: Counts, schedule: Schedule, cost: Cost, *notes: str
) -> ScoredDraft:
    """Return the draft of a schedule with its score and what ``notes`` say of it."""
    note = ", ".join(filter(None, notes))
    stages = schedule.stages if cost.layout.place else None
    draft = Draft(chunking, counts, schedule.kinds, schedule.chunks, note=note, stages=stages)
    return ScoredDraft(schedule.seconds, schedule.over_bytes, draft, cost)


def uniform_draft(
    batch: SortedBatch,
    chunking: Chunking,
    policies: Sequence[NotedPolicy],
    cost: Cost,
    options: Options,
    note: str = "",
    modes: Sequence[str] = (FULL,),
    below: float = np.inf,
) -> ScoredDraft | None:
    """The best of ``policies`` with the fewest recomputed layers that fit, alike on all stages.

    Where nothing fits, everything is recomputed, and the plan says that it does not fit. Of several
    ``modes`` the first one with which something fits is taken. None if surely not under ``below``
    seconds.
    """
    loads = loads_of(chunking, batch.lengths, cost.multiple)
    if np.isfinite(below) and work_bound_seconds(loads, cost) >= below:
        return None
    split = any(isinstance(how, Schedule) or how.split for how, _ in policies)
    problems = ChunkProblems(cost, chunking, loads, split)

    def play(mode: str, layers: int) -> tuple[Counts, Schedule, str]:
        grid = np.minimum(np.array(cost.layout.layers), layers)[:, None]
        counts = cost.layout.kinds.first(mode, np.tile(grid, (1, chunking.count)))
        return counts, *best_schedule(problems, counts, policies)

    description = ""
    counts, schedule, how = play(modes[0], 0)
    for mode in modes:
        if schedule.over_bytes <= 0:
            break
        low, high = 1, max(cost.layout.layers)  # the fewest that fit lie in low..high
        while low < high:
            middle = (low + high) // 2
            if play(mode, middle)[1].over_bytes > 0:
                low = middle + 1
            else:
                high = middle
        counts, schedule, how = play(mode, low)
        description = f"{'offload' if mode == OFFLOAD else 'recompute'} {low} layers"
    return scored_draft(chunking, counts, schedule, cost, note, how, description)
