"""Schedule of Seq1F1B as in InfiniPipe's baseline: chunks of fixed size, static recompute.

The original Seq1F1B slices every sequence into the same number of slices, which does not suit
varying lengths. InfiniPipe's baseline slices and packs to a fixed size. For each batch, simulation
chooses the best size in hindsight, so this is a strong baseline.
"""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.fixed_size import fixed_chunks, sizes
from megatron_epp.planner.lower_bound import ordered_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import loads_of, rates_of
from megatron_epp.planner.order.warmup import constant
from megatron_epp.planner.recompute.uniform import ScoredDraft, better, one_f_one_b, uniform_draft


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return the fastest draft over several chunk sizes, with the least recompute that fits.

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
        if better(best, ordered_bound_seconds(chunking, loads, cost), below):
            in_flight_limit = constant(chunking.sizes, cost.layout.stages)
            policies = one_f_one_b(in_flight_limit, chunking.sizes, cost)
            played = uniform_draft(batch, chunking, policies, cost, options, f"size {size}")
            drafts = [each for each in (best, played) if each is not None]
            best = min(drafts, key=lambda scored: scored.rank, default=None)
    return best
