"""Schedule ZB-V (`zb-v`, arXiv 2401.10241), for V placements.

Unsliced documents are packed to the context, backwards are split, and as many forwards are in
flight as with 1F1B. The paper's own order of ops is tried, too. If F, I and W take the same time,
this order has no bubbles.
"""

from collections import Counter

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.compiled import F, I, W
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.list_scheduler import Schedule
from megatron_epp.planner.published.one_f_one_b import held_policies
from megatron_epp.planner.published.packing import packed
from megatron_epp.planner.recompute.uniform import NotedPolicy, ScoredDraft, uniform_draft


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return the best draft (plan as arrays), by list scheduling or with the paper's order.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    chunking, note = packed(batch, cost, options)
    warm = np.full(cost.layout.placement.ranks, 2 * cost.layout.placement.ranks)
    policies: list[NotedPolicy] = list(held_policies(cost, chunking.count, warm, split=True))
    if not cost.layout.vocabulary_parallel:  # not covered by the paper
        policies.append((papers_order(chunking, cost.layout.place), "ZB-V's order"))
    return uniform_draft(batch, chunking, policies, cost, options, note, below=below)


def papers_order(chunking: Chunking, place: tuple[int, ...]) -> Schedule:
    """Return ZB-V's order of ops for every rank, without times.

    Source: arXiv 2401.10241, section 6. If there are too few chunks to fill the V, the order for
    enough chunks is used, and the ops of missing chunks are left out.
    """
    ranks, count = len(place) // 2, chunking.count
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for down in range(ranks):
        up, after = 2 * ranks - 1 - down, ranks - down
        both = [(F, down), (I, down), (W, down), (F, up), (I, up), (W, up)]
        steps = [(F, down)] * (2 * after - 1) + [(F, up), (F, down)] * down
        steps += both[3:] * after + both * (max(count, 2 * ranks - 1) - ranks)
        steps += [(I, down), (I, up)] * down + [(I, down), (W, down)] * after
        steps += [(W, up)] * down + [(W, down)] * down
        ran: Counter[tuple[int, int]] = Counter()
        for kind, stage in steps:
            number = ran[kind, stage]
            ran[kind, stage] += 1
            if number < count:
                chunk = number if kind == F else int(chunking.backward[number])
                rows[place[down]].append((kind, chunk, stage))
    kinds, chunks, stages = np.array(rows).transpose(2, 0, 1)
    nothing, times = np.zeros(ranks), np.zeros(kinds.shape)
    ops = kinds.astype(np.int8), chunks.astype(np.int32), stages.astype(np.int32)
    return Schedule(np.inf, nothing, 0.0, *ops, times, times)


def is_v(place: tuple[int, ...]) -> bool:
    """Return whether the ranks of the stages form a V: each rank once, then again in reverse."""
    half = len(place) // 2
    return half > 0 and sorted(place[:half]) == list(range(half)) and place == place[::-1]
