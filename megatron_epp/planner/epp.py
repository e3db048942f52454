"""Ours: chunks, order and recompute chosen by exact simulation."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner import packing
from megatron_epp.planner.buckets import longest_first
from megatron_epp.planner.chunking import Chunking, assemble
from megatron_epp.planner.finish import Batch, Draft, finish
from megatron_epp.planner.listing import Listed, Policy, list_schedule
from megatron_epp.planner.memory import most_tokens, require_fit
from megatron_epp.planner.options import Options
from megatron_epp.planner.recompute import diagonal_counts
from megatron_epp.planner.result import Planned
from megatron_epp.planner.slicing import Rates, cut_each, ideal_chunks
from megatron_epp.planner.windows import shrinking, whole_groups
from megatron_epp.planner.work import loads_of, rates_of, work_of


@dataclass(frozen=True, slots=True)
class Scored:
    """A draft with what the list scheduler says of it."""

    seconds: float
    over_bytes: float
    draft: Draft

    @property
    def rank(self) -> tuple[bool, float]:
        return self.over_bytes > 0, self.seconds


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> Planned:
    """The fastest plan found within the budget; see the levers in :mod:`.options`."""
    began = time.perf_counter()
    batch = Batch.of(lengths)
    require_fit(cost, batch.documents)
    rates = rates_of(cost)
    scored = [
        option
        for chunking, note in chunkings(batch, cost, rates, options)
        for option in orders(batch, chunking, note, cost, options)
    ]
    best = min(scored, key=lambda option: option.rank)
    found = finish("epp", batch, best.draft, cost, options, began)
    others = [packing.plan(lengths, cost, options)]
    return min([found, *others], key=lambda planned: (not planned.fits, planned.seconds))


def chunkings(
    batch: Batch, cost: Cost, rates: Rates, options: Options
) -> Iterator[tuple[Chunking, str]]:
    """Chunkings of several target times per chunk, around the best of the closed form."""
    total = float(rates.document_seconds(batch.lengths).sum())
    ideal = ideal_chunks(total, rates, cost.stages)
    most = most_tokens(cost)
    seen = set()
    for factor in (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0):
        wanted = max(cost.stages, round(ideal * factor))
        target = total / wanted
        cuts = cut_each(batch.lengths, target, rates, most, options.multiple)
        loose = float(
            rates.seconds(cuts.tails.tokens, cuts.tails.pairs).sum()
            + rates.seconds(cuts.shorts.tokens, cuts.shorts.pairs).sum()
        )
        bins = max(1, round(loose / target))
        key = (len(cuts.slices), bins)
        if key in seen:
            continue
        seen.add(key)
        bucket, count = longest_first(cuts, rates, bins, most)
        yield assemble(cuts, bucket, count, rates), f"target {target:.4g} s, bins {count}"


def orders(
    batch: Batch, chunking: Chunking, note: str, cost: Cost, options: Options
) -> Iterator[Scored]:
    loads = loads_of(chunking, batch.lengths, options.multiple)
    kept = work_of(cost, chunking, loads, {})
    law = shrinking(chunking.sizes, cost.stages)
    counts = diagonal_counts(cost, loads, kept, law, integer=False)
    work = kept if not counts else work_of(cost, chunking, loads, counts)
    if counts is None:
        return

    def scored(listed: Listed, what: str, split: bool = False) -> Scored:
        draft = Draft(chunking, counts, listed.kinds, listed.chunks, split, note=f"{note}, {what}")
        return Scored(listed.seconds, listed.over_bytes, draft)

    yield scored(list_schedule(work, Policy(law, law, law)), "strict")
    groups = whole_groups(chunking.sizes, cost.stages)
    everything = np.full_like(law, chunking.count)
    yield scored(list_schedule(work, Policy(groups, law, everything)), "list")
    if "wsplit" in options.levers:
        for held in (0.0, np.inf):
            listed = list_schedule(work, Policy(law, law, law, True, held))
            yield scored(listed, f"strict W {held}", True)
            listed = list_schedule(work, Policy(groups, law, everything, True, held))
            yield scored(listed, f"list W {held}", True)
