"""Forward-only plans for evaluation, with chunks built as for training."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import KIND_CODE, Kind, Plan, PlanError, check, rules_for
from megatron_epp.planner.chunks.bin_packing import longest_first
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.chunking import assemble
from megatron_epp.planner.chunks.slicing import cut_each, ideal_chunks
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.compiled import NOTHING
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.emit_block import MemberPlan, member_plans
from megatron_epp.planner.order.problem import rates_of, with_unrecomputed
from megatron_epp.sim.play import play

# A document that does not fit in this many slices is refused: its K/V alone are too large.
FINEST = 64
# Factor on the chunk size if chunks exceed the budget; chosen by hand.
SMALLER = 0.6


def evaluation_plans(
    lengths: Sequence[int], cost: Cost, options: Options, most: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], tuple[Plan, ...]]:
    """Assign documents to the replicas of a lockstep group, and plan an evaluation of each replica.

    Plans have chunks of about equal time. Their ops are F and, with vocabulary parallelism, H. No
    activations are saved, so memory must only hold a chunk's workspace and the K/V of one sliced
    document at a time.

    Args:
        lengths: lengths of the lockstep group's documents in tokens, at least one per replica.
        cost: cost model, including the stages and parallel degrees.
        options: planner options; only ``lockstep`` matters.
        most: maximum number of tokens of a chunk; None if only memory limits it.

    Returns:
        For each replica, the indices of its documents; and the plan of each replica.

    Raises:
        PlanError: if a document's K/V and workspace do not fit, even in the smallest slices.
        ValueError: if there are no documents, or a length is less than 1.
    """
    batch = SortedBatch.of(lengths)
    longest = int(batch.lengths[0])
    total = int(batch.lengths.sum())
    most = total if most is None else min(most, total)
    while True:
        if most < max(cost.multiple, longest // FINEST):
            raise PlanError(
                f"document {batch.names[0]} of {longest} tokens does not fit in evaluation, even "
                f"in {FINEST} slices: raise the memory budget or use more devices"
            )
        members, peaks = _shares(batch, cost, options, most)
        plans = tuple(member.plan for member in members)
        states = np.array(cost.states_of_ranks)
        headroom = np.maximum(cost.headroom_bytes, 1.0)
        worst = float(((np.array(peaks) - states) / headroom).max())
        if worst <= 1:
            for plan in plans:
                check(plan)
            return tuple(member.assignment for member in members), plans
        largest = max(chunk.tokens for plan in plans for chunk in plan.chunks)
        most = min(most - 1, int(largest * SMALLER))


def _order(count: int, cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """Return the op kinds and the chunks [stages, ops] of a forward-only order, equal for stages.

    With vocabulary parallelism, the H of chunk c follows the F of chunk c + stages. In the meantime
    the last stage's output for chunk c is computed and sent to all stages.
    """
    rules = rules_for(cost.layout.vocabulary_parallel, forward_only=True)
    order = [
        (KIND_CODE[kind], at - after)
        for at in range(count + cost.layout.stages)
        for kind, after in ((Kind.FORWARD, 0), (Kind.HEAD, cost.layout.stages))
        if kind in rules and 0 <= at - after < count
    ]
    kinds, chunks = (
        np.tile(np.array(each), (cost.layout.stages, 1)) for each in zip(*order, strict=True)
    )
    return kinds, chunks


def _turns(kinds: np.ndarray, cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """Return the stage of each op of a rank, and the op's index in the stage's order: [ranks, ops].

    ``kinds`` [stages, ops] has equal rows. A stage runs each op one step after the stage before it.
    """
    stages, ops = kinds.shape
    rows = []
    for rank in range(cost.layout.placement.ranks):
        own = [stage for stage in range(stages) if cost.layout.placement.place[stage] == rank]
        rows.append(sorted((at + stage, stage, at) for stage in own for at in range(ops)))
    most = max(map(len, rows))
    turns = np.full((2, len(rows), most), -1, np.int64)
    for rank, row in enumerate(rows):
        for number, (_, stage, at) in enumerate(row):
            turns[:, rank, number] = stage, at
    return turns[0], turns[1]


def _shares(
    batch: SortedBatch, cost: Cost, options: Options, most: int
) -> tuple[tuple[MemberPlan, ...], np.ndarray]:
    """Return plans with chunks of at most ``most`` tokens, and their peak bytes [ranks]."""
    rates, width = rates_of(cost), options.lockstep
    total = float(rates.document_seconds(batch.lengths).sum())
    pp = cost.layout.stages
    wanted = max(pp, round(ideal_chunks(total / width, rates, pp))) * width
    cuts = cut_each(batch.lengths, total / wanted, rates, most, cost.multiple)
    loose = rates.span_seconds(cuts.tails).sum()
    loose += rates.span_seconds(cuts.shorts).sum()
    bins = max(1, round(float(loose) * wanted / total))
    bucket, buckets = longest_first(cuts, rates, bins, most)
    chunking = folded(assemble(cuts, bucket, buckets, rates), width, rates)
    kinds, chunks = _order(chunking.count, cost)
    draft = Draft(chunking, {}, kinds, chunks)
    if cost.layout.place:
        stages, at = _turns(kinds, cost)
        own = [np.where(at < 0, NOTHING, each[0, at]) for each in (kinds, chunks)]
        draft = Draft(chunking, {}, own[0], own[1], stages=stages)
    members = member_plans(batch, draft, cost)
    counts = with_unrecomputed(cost, {}, chunking.count)
    tables = [cost.table_of(member.loads, counts, forward_only=True) for member in members]
    played = [play(member.plan, table) for member, table in zip(members, tables, strict=True)]
    return members, np.max([each.peak_bytes for each in played], axis=0)
