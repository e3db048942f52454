"""Uniform recompute: the least number of layers that fits, the same for every chunk and stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL, OFFLOAD
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.order.emit import Draft
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, warm_up_policies
from megatron_epp.planner.order.problem import ChunkProblems, Counts
from megatron_epp.planner.order.replay import replayed

NotedPolicy = tuple[Policy | Schedule, str]  # a policy or an order, and its description


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A draft (plan as arrays) and its simulated time.

    Attributes:
        seconds: simulated seconds of the iteration.
        over_bytes: maximum over the ranks of bytes above the budget; 0 if the draft fits.
        draft: the plan as arrays.
    """

    seconds: float
    over_bytes: float
    draft: Draft

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: bytes over the budget, then seconds."""
        return self.over_bytes, self.seconds


def better(best: ScoredDraft | None, bound_seconds: float, below: float) -> bool:
    """Return whether a plan with lower bound ``bound_seconds`` may be better than ``best``.

    The result is False if the bound is ``below`` seconds or more. Otherwise, any plan may be better
    if ``best`` is None or does not fit in memory.
    """
    return bound_seconds < below and (
        best is None or best.over_bytes > 0 or bound_seconds < best.seconds
    )


def strict(least: np.ndarray) -> Policy:
    """Return the policy with exactly ``least`` forwards before each backward."""
    return Policy(least, least, least)


def one_f_one_b(least: np.ndarray, sizes: np.ndarray, cost: Cost) -> list[NotedPolicy]:
    """Return the 1F1B policies to try, with descriptions.

    With one stage per rank, the only policy runs ``least`` [stages, chunks] forwards before each
    backward. Otherwise, the policies have different warm-ups. ``sizes`` [groups] contains the
    number of chunks of every group (sliced document or pack).
    """
    if cost.layout.place:
        return list(warm_up_policies(cost.layout.place, sizes, (False,)))
    return [(strict(least), str(PolicyParams(strict=True)))]


def best_schedule(
    problems: ChunkProblems, counts: Counts, policies: Sequence[NotedPolicy]
) -> tuple[Schedule, str]:
    """Simulate policies or given schedules; return the best schedule and its description."""
    work = problems.of(counts)
    played = (
        (replayed(work, how) if isinstance(how, Schedule) else list_schedule(work, how), said)
        for how, said in policies
    )
    return min(played, key=lambda each: (each[0].over_bytes, each[0].seconds))


def scored_draft(
    chunking: Chunking,
    counts: Counts,
    schedule: Schedule,
    cost: Cost,
    parts: Sequence[str],
    order: str,
) -> ScoredDraft:
    """Return a schedule as a draft, with its time and excess bytes.

    Args:
        chunking: the chunks.
        counts: number of layers [stages, chunks] by (layer kind, recompute mode).
        schedule: the schedule.
        cost: cost model, including the stages and parallel degrees.
        parts: descriptions of the chunks and of recompute; empty strings are left out.
        order: description of the order of ops.
    """
    note = f"{', '.join(filter(None, parts))}; {order}"
    stages = schedule.stages if cost.layout.place else None
    draft = Draft(chunking, counts, schedule.kinds, schedule.chunks, note=note, stages=stages)
    return ScoredDraft(schedule.seconds, schedule.over_bytes, draft)


def uniform_draft(
    problems: ChunkProblems,
    policies: Sequence[NotedPolicy],
    note: str,
    modes: Sequence[str],
    least: int = 0,
) -> ScoredDraft:
    """Return the best draft of several policies, with the least uniform recompute that fits.

    The same number of layers is recomputed in every stage and chunk. If nothing fits, all layers
    have the last of ``modes``, and the draft has positive ``over_bytes``.

    Args:
        problems: scheduling problems of the chunking.
        policies: policies or orders to try.
        note: description of the chunking.
        modes: recompute modes; the first mode with which the draft fits is used. If empty, exactly
            ``least`` layers of every stage are recomputed.
        least: minimum number of layers of every stage that are recomputed.
    """
    cost, chunking = problems.cost, problems.chunking

    def play(mode: str, layers: int) -> tuple[Counts, Schedule, str]:
        grid = np.minimum(np.array(cost.layout.layers), layers)[:, None]
        counts = cost.layout.kinds.first(mode, np.tile(grid, (1, chunking.count)))
        return counts, *best_schedule(problems, counts, policies)

    description = f"layers recomputed in every stage: {least}" if least else ""
    counts, schedule, how = play(FULL, least)
    for mode in modes:
        if schedule.over_bytes <= 0:
            break
        low, high = least + 1, max(cost.layout.layers)  # the least number that fits is in low..high
        while low < high:
            middle = (low + high) // 2
            if play(mode, middle)[1].over_bytes > 0:
                low = middle + 1
            else:
                high = middle
        counts, schedule, how = play(mode, low)
        how_saved = "offloaded" if mode == OFFLOAD else "recomputed"
        description = f"layers {how_saved} in every stage: {low}"
    return scored_draft(chunking, counts, schedule, cost, (note, description), how)
