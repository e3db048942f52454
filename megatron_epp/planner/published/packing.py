"""Whole documents packed to the context, 1F1B, uniform recompute just enough to fit.

What a trainer does that packs without letting documents see each other: the plainest baseline,
and the fallback where another planner failed.
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
    """Whole documents by falling length, first fit, in chunks of the context; and a text on it."""
    context, rates = max(options.context, int(batch.lengths[0])), rates_of(cost)
    chunking = folded(packed_chunks(batch.lengths, context, rates), options.lockstep, rates)
    return chunking, f"context {context}"


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Documents :func:`packed`; the window of plain 1F1B.

    None if surely not under ``below`` seconds.
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
