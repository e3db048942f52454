"""ZB-V (`zb-v`, arXiv 2401.10241): packs as of `1f1b`, backwards split, as many forwards in flight
as 1F1B holds; of a V alone."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.published.one_f_one_b import held_policies
from megatron_epp.planner.published.packing import packed
from megatron_epp.planner.recompute.uniform import ScoredDraft, uniform_draft


def draft(batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    chunking, note = packed(batch, cost, options)
    warm = np.full(cost.ranks, 2 * cost.ranks)
    policies = list(held_policies(cost, chunking.count, warm, split=True))
    return uniform_draft(batch, chunking, policies, cost, options, note)


def is_v(place: tuple[int, ...]) -> bool:
    """Whether the second half of the stages lies on the ranks of the first, backwards."""
    half = len(place) // 2
    return half > 0 and sorted(place[:half]) == list(range(half)) and place == place[::-1]
