"""Plans for evaluation: forwards only, through the same chunker."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import KEEP, Kind, Op, Plan, PlanError, check
from megatron_epp.planner.chunks.bin_packing import longest_first
from megatron_epp.planner.chunks.chunking import assemble
from megatron_epp.planner.chunks.slicing import cut_each, ideal_chunks
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import loads_of, rates_of, with_kept
from megatron_epp.sim.play import play

# A document that does not fit in so many slices is refused: its K and V alone are too large.
FINEST = 64
# Chunks that exceed the budget are made smaller by this factor and tried again. By hand.
SMALLER = 0.6


def evaluation_plan(
    lengths: Sequence[int], cost: Cost, options: Options | None = None, most: int | None = None
) -> Plan:
    """Every chunk's F on every stage, in chunks of about equal time that fit the budget, and of at
    most ``most`` tokens where that is given.

    Activations are not kept, so memory asks only for a chunk's own workspace and for the K and V
    of one cut document at a time. A PlanError where even that does not fit.
    """
    options = options or Options()
    batch = SortedBatch.of(lengths)
    longest = int(batch.lengths[0])
    total = int(batch.lengths.sum())
    most = total if most is None else min(most, total)
    while True:
        if most < max(options.multiple, longest // FINEST):
            raise PlanError(
                f"document {batch.names[0]} of {longest} tokens does not fit in evaluation, even "
                f"in {FINEST} slices: raise the memory budget or use more devices"
            )
        plan, peaks = _plan(batch, cost, options, most)
        room = np.array(cost.budget_bytes) - np.array(cost.states_bytes)
        used = np.array(peaks) - np.array(cost.states_bytes)
        worst = float((used / np.maximum(room, 1.0)).max())
        if worst <= 1:
            check(plan)
            return plan
        most = min(most - 1, int(max(chunk.tokens for chunk in plan.chunks) * SMALLER))


def _plan(
    batch: SortedBatch, cost: Cost, options: Options, most: int
) -> tuple[Plan, tuple[int, ...]]:
    """The plan with chunks of at most ``most`` tokens, and its peaks."""
    rates = rates_of(cost)
    total = float(rates.document_seconds(batch.lengths).sum())
    wanted = max(cost.stages, round(ideal_chunks(total, rates, cost.stages)))
    cuts = cut_each(batch.lengths, total / wanted, rates, most, options.multiple)
    loose = rates.span_seconds(cuts.tails).sum()
    loose += rates.span_seconds(cuts.shorts).sum()
    bins = max(1, round(float(loose) * wanted / total))
    bucket, buckets = longest_first(cuts, rates, bins, most)
    chunking = assemble(cuts, bucket, buckets, rates)
    order = tuple(Op(Kind.FORWARD, chunk) for chunk in range(chunking.count))
    plan = Plan(
        documents=batch.documents,
        layers=cost.layers,
        chunks=chunking.ir_chunks(batch.names),
        recompute=tuple((KEEP * layers,) * chunking.count for layers in cost.layers),
        orders=(order,) * cost.stages,
    )
    loads = batch.named(loads_of(chunking, batch.lengths, options.multiple))
    counts = with_kept(cost, {}, chunking.count)
    return plan, play(plan, cost.table_of(loads, counts, forward_only=True)).peak_bytes
