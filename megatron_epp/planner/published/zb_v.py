"""ZB-V (`zb-v`, arXiv 2401.10241), for a V placement alone.

Whole documents packed to the context, backwards split, as many forwards in flight as 1F1B holds.
"""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.published.one_f_one_b import held_policies
from megatron_epp.planner.published.packing import packed
from megatron_epp.planner.recompute.uniform import ScoredDraft, uniform_draft


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return its schedule; None if surely not under ``below`` seconds."""
    chunking, note = packed(batch, cost, options)
    warm = np.full(cost.layout.placement.ranks, 2 * cost.layout.placement.ranks)
    policies = list(held_policies(cost, chunking.count, warm, split=True))
    return uniform_draft(batch, chunking, policies, cost, options, note, below=below)


def is_v(place: tuple[int, ...]) -> bool:
    """Return whether the second half of the stages lies on the ranks of the first, backwards."""
    half = len(place) // 2
    return half > 0 and sorted(place[:half]) == list(range(half)) and place == place[::-1]
