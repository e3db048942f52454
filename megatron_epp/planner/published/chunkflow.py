"""Schedule of ChunkFlow: chunks of one size; a document's last K chunks save activations.

The earlier chunks of a sliced document recompute all their layers in backward. This implementation
saves the input of every layer. As in the paper, size and K come from a small grid. For each batch,
simulation chooses the best size and K in hindsight, so this is a strong baseline.
"""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.fixed_size import fixed_chunks, sizes
from megatron_epp.planner.lower_bound import ordered_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import ChunkProblems, Counts, loads_of, rates_of
from megatron_epp.planner.order.warmup import shrinking_in_flight
from megatron_epp.planner.recompute.uniform import (
    ScoredDraft,
    best_schedule,
    better,
    one_f_one_b,
    scored_draft,
)

KEPT = (1, 2, 4, 8, 16)  # values of K


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return the fastest draft (plan as arrays) over a grid of chunk sizes and values of K.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    context = max(options.context, int(batch.lengths[0]))
    best: ScoredDraft | None = None
    for size in sizes(context, cost.multiple):
        rates = rates_of(cost)
        chunking = folded(fixed_chunks(batch.lengths, size, rates), options.lockstep, rates)
        loads = loads_of(chunking, batch.lengths, cost.multiple)
        bound = ordered_bound_seconds(chunking, loads, cost)
        in_flight_limit = shrinking_in_flight(chunking.sizes, cost.layout.stages)
        policies = one_f_one_b(in_flight_limit, chunking.sizes, cost)
        most = int(chunking.sizes.max())
        problems = ChunkProblems(cost, chunking, loads, split=False)
        for kept in sorted({min(kept, most) for kept in KEPT}):
            if not better(best, bound, below):
                break
            counts = discarded(cost, chunking, kept)
            schedule, how = best_schedule(problems, counts, policies)
            played = scored_draft(chunking, counts, schedule, cost, f"size {size}, K {kept}", how)
            best = played if best is None else min(best, played, key=lambda drafted: drafted.rank)
    return best


def discarded(cost: Cost, chunking: Chunking, kept: int) -> Counts:
    """Return counts that recompute all layers, except in a document's last ``kept`` chunks."""
    early = chunking.last_of_group - np.arange(chunking.count) >= kept
    grid = np.outer(np.array(cost.layout.layers, dtype=np.float64), early)
    return cost.layout.kinds.first(FULL, grid)
