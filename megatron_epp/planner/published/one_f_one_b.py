"""Schedule 1F1B (`1f1b`, arXiv 2104.04473), interleaved if the stages are.

Unsliced documents packed to the context, with Megatron's warm-up. Where strict alternation would
block because chunks differ, further forwards run.
"""

from collections.abc import Iterator

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.policies import warm_up_policy
from megatron_epp.planner.order.warmup import interleaved_warm_up
from megatron_epp.planner.published.packing import packed
from megatron_epp.planner.recompute.uniform import NotedPolicy, ScoredDraft, uniform_draft


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return the better draft of strict and relaxed 1F1B.

    Args:
        batch: the documents.
        cost: cost of the layout.
        options: options of the planner.
        below: upper bound of interest in seconds.

    Returns:
        None if its lower bound is not below ``below`` seconds.
    """
    chunking, note = packed(batch, cost, options)
    ranks, stages = cost.layout.placement.ranks, cost.layout.stages
    alone = ranks - 1 - np.arange(ranks)
    warm = (alone if stages == ranks else interleaved_warm_up(ranks, stages)) + 1
    policies = list(held_policies(cost, chunking.count, warm, split=False))
    return uniform_draft(batch, chunking, policies, cost, options, note, below=below)


def held_policies(cost: Cost, chunks: int, warm: np.ndarray, split: bool) -> Iterator[NotedPolicy]:
    """Yield two policies with ``warm`` forwards in flight, and their descriptions.

    The first never has more; the second has more if nothing else can run.

    Args:
        cost: cost of the layout.
        chunks: number of chunks.
        warm: [ranks] number of forwards.
        split: whether backwards are split.
    """
    for strict, how in ((True, ""), (False, ", forwards where nothing else can run")):
        flags = {"split": split, "deep": True, "strict": strict}
        said = f"{'split' if split else 'whole'} backwards, {warm[0]} forwards first{how}"
        yield warm_up_policy(cost.layout.placement.place, chunks, warm, **flags), said


def is_interleaved(place: tuple[int, ...]) -> bool:
    """Return whether stages are assigned to ranks round-robin."""
    ranks = max(place) + 1
    return place == tuple(range(ranks)) * (len(place) // ranks)
