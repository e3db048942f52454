"""Emit the plans of a block from one draft, checked and played: one order and one recompute choice,
own documents. The one way out of every pipeline planner: a replica alone is a block of one."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import Plan, Table, check
from megatron_epp.planner.chunks.block import BlockChunking
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.lower_bound import block_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch, as_planned, plan_of
from megatron_epp.planner.order.problem import loads_of, with_kept
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.sim.in_step import in_step
from megatron_epp.sim.play import play


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """deals[r]: documents of the batch, in its order, that replica r of the block computes by
    planned[r]. They run in lockstep, so the seconds of all are the block's."""

    deals: tuple[tuple[int, ...], ...]
    planned: tuple[PlannedReplica, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """A replica's: its documents, their plan, and its loads with its own numbers for them."""

    deal: tuple[int, ...]
    plan: Plan
    loads: Loads


def shares_of(batch: SortedBatch, draft: Draft, cost: Cost, options: Options) -> tuple[Share, ...]:
    """Plans of every replica of the block that ``draft`` is for; one where it is for one."""
    chunking = draft.chunking
    members = chunking.members if isinstance(chunking, BlockChunking) else (chunking,)
    return tuple(_share(batch, draft, member, cost, options) for member in members)


def _share(
    batch: SortedBatch, draft: Draft, member: Chunking, cost: Cost, options: Options
) -> Share:
    deal = tuple(sorted(batch.names[d] for d in np.unique(member.spans.document)))
    local = {document: number for number, document in enumerate(deal)}
    # Of documents that another replica has nothing is asked.
    names = tuple(local.get(document, -1) for document in batch.names)
    documents = tuple(batch.documents[document] for document in deal)
    mine = SortedBatch(batch.lengths, names, documents)
    plan = plan_of(mine, dataclasses.replace(draft, chunking=member), cost)
    return Share(deal, plan, mine.named(loads_of(member, batch.lengths, options.multiple)))


def tables_in_step(shares: tuple[Share, ...], draft: Draft, cost: Cost) -> tuple[Table, ...]:
    """Tables of every replica: its bytes, and the seconds of the slowest."""
    counts = with_kept(cost, draft.counts, draft.chunking.count)
    return in_step([cost.table_of(share.loads, counts) for share in shares])


def emit_block(
    planner: str, batch: SortedBatch, draft: Draft, cost: Cost, options: Options
) -> PlannedBlock:
    """The plans of ``draft``, checked and played."""
    shares = shares_of(batch, draft, cost, options)
    local = any(chunk.has_local for share in shares for chunk in share.plan.chunks)
    bound = block_bound_seconds(batch.lengths, cost, options.lockstep, local)
    planned = []
    for share, table in zip(shares, tables_in_step(shares, draft, cost), strict=True):
        check(share.plan)
        played = play(share.plan, table)
        planned.append(as_planned(planner, share.plan, draft, played, bound, cost, options))
    return PlannedBlock(tuple(share.deal for share in shares), tuple(planned))


def block_peaks(batch: SortedBatch, draft: Draft, cost: Cost, options: Options) -> np.ndarray:
    """[stages]: bytes, residents included, by the simulator's ledger; the most of any replica."""
    shares = shares_of(batch, draft, cost, options)
    tables = tables_in_step(shares, draft, cost)
    return np.max(
        [play(share.plan, table).peak_bytes for share, table in zip(shares, tables, strict=True)],
        axis=0,
    )
