"""Schedule of plain packing (`packing`): 1F1B with the least uniform recompute that fits.

Unsliced documents are packed to the context, and attention stays within a document. This schedule
is the simplest baseline, and the fallback if another planner fails.
"""

from dataclasses import replace

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.fixed_size import packed_chunks
from megatron_epp.planner.lower_bound import ordered_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import loads_of, rates_of
from megatron_epp.planner.order.warmup import constant
from megatron_epp.planner.recompute.uniform import ScoredDraft, one_f_one_b, uniform_draft


def packed(batch: SortedBatch, cost: Cost, options: Options) -> tuple[Chunking, str]:
    """Return chunks with unsliced documents packed first-fit to the context, with a description."""
    context, rates = max(options.context, int(batch.lengths[0])), rates_of(cost)
    chunking = folded(packed_chunks(batch.lengths, context, rates), options.lockstep, rates)
    return chunking, f"context {context}"


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return the draft (plan as arrays) of packed documents with 1F1B's in-flight limit.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    chunking, note = packed(batch, cost, options)
    loads = loads_of(chunking, batch.lengths, cost.multiple)
    if ordered_bound_seconds(chunking, loads, cost) >= below:
        return None
    policies = one_f_one_b(constant(chunking.sizes, cost.layout.stages), chunking.sizes, cost)
    scored = uniform_draft(batch, chunking, policies, cost, options, note)
    if scored is None:
        return None
    tokens = max(options.context, int(batch.lengths[0]))
    return replace(scored, draft=replace(scored.draft, packing_tokens=tokens))
