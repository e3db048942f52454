"""Schedule 1F1B (`1f1b`, arXiv 2104.04473), interleaved if ranks have several stages.

Unsliced documents are packed to the context and run with Megatron's warm-up. Chunks differ in time,
so a rank may have to wait if it strictly alternates F and B. Relaxed 1F1B then runs more forwards.
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
    """Return the better of two drafts (plans as arrays): strict and relaxed 1F1B.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    chunking, note = packed(batch, cost, options)
    ranks, stages = cost.layout.placement.ranks, cost.layout.stages
    alone = ranks - 1 - np.arange(ranks)
    warm = (alone if stages == ranks else interleaved_warm_up(ranks, stages)) + 1
    policies = list(held_policies(cost, chunking.count, warm, split=False))
    return uniform_draft(batch, chunking, policies, cost, options, note, below=below)


def held_policies(cost: Cost, chunks: int, warm: np.ndarray, split: bool) -> Iterator[NotedPolicy]:
    """Yield two policies with ``warm`` forwards in flight, each with a description.

    The first policy never exceeds this number. The second policy runs more forwards if no other op
    can run.

    Args:
        cost: cost model, including the stages and parallel degrees.
        chunks: number of chunks.
        warm: [ranks] number of forwards in flight.
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
