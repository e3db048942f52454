"""1F1B (`1f1b`, arXiv 2104.04473): whole documents packed to the context, Megatron's warm-up;
interleaved where the stages are.

Where strict alternation would stop, because chunks differ, forwards go on.
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


def draft(batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    chunking, note = packed(batch, cost, options)
    ranks, stages = cost.ranks, cost.stages
    alone = ranks - 1 - np.arange(ranks)
    warm = (alone if stages == ranks else interleaved_warm_up(ranks, stages)) + 1
    policies = list(held_policies(cost, chunking.count, warm, split=False))
    return uniform_draft(batch, chunking, policies, cost, options, note)


def held_policies(cost: Cost, chunks: int, warm: np.ndarray, split: bool) -> Iterator[NotedPolicy]:
    """``warm`` [ranks] forwards in flight: never more, or more where nothing else can run."""
    for strict, how in ((True, ""), (False, ", forwards where nothing else can run")):
        flags = {"split": split, "deep": True, "strict": strict}
        said = f"{'split' if split else 'whole'} backwards, {warm[0]} forwards first{how}"
        yield warm_up_policy(cost.rank_of, chunks, warm, **flags), said


def is_interleaved(place: tuple[int, ...]) -> bool:
    """Whether stages lie on the ranks in turn; one on each is once."""
    ranks = max(place) + 1
    return place == tuple(range(ranks)) * (len(place) // ranks)
