"""Simulated plans for a block (lockstep group of replicas), from one draft (plan as arrays).

The plans of a block have the same order of ops and the same recompute, but different documents. All
planners use this module; a single replica is a block of width 1.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.host_memory import host_peak_bytes
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import OFFLOAD, Plan, Prediction, Table
from megatron_epp.planner.chunks.block import BlockChunking
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.lower_bound import block_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch, plan_of
from megatron_epp.planner.order.problem import loads_of, with_unrecomputed
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.sim.in_step import in_step
from megatron_epp.sim.play import play


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """Plans of a lockstep group of replicas; all plans take the same time.

    Attributes:
        assignments: for every replica, the indices of its documents in the batch.
        planned: plan of every replica.
        ends: for every replica and each of its documents of the batch, the index of the plan's
            document in which it ends (:class:`megatron_epp.ir.Step`); () if no document has a
            prefix.
    """

    assignments: tuple[tuple[int, ...], ...]
    planned: tuple[PlannedReplica, ...]
    ends: tuple[tuple[int, ...], ...] = ()

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: whether a plan does not fit, then seconds."""
        return not all(each.fits for each in self.planned), self.planned[0].seconds


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """Documents of one replica, its plan, and the tokens and pairs of its chunks."""

    assignment: tuple[int, ...]
    plan: Plan
    loads: Loads


def member_plans(batch: SortedBatch, draft: Draft, cost: Cost) -> tuple[MemberPlan, ...]:
    """Return the plan of every replica of a lockstep group.

    Args:
        batch: the documents, sorted by length.
        draft: the common plan as arrays.
        cost: cost model, including the stages and parallel degrees.
    """
    chunking = draft.chunking
    members = chunking.members if isinstance(chunking, BlockChunking) else (chunking,)
    batches = [SortedBatch.of_trees([tree]) for tree in batch.trees] or [batch] * len(members)
    return tuple(
        _member_plan(of, draft, member, cost) for of, member in zip(batches, members, strict=True)
    )


def most_host_bytes(batch: SortedBatch, draft: Draft, cost: Cost) -> float:
    """Return the peak bytes that a device offloads: the most over ranks and replicas, or 0.

    The arguments are those of :func:`member_plans`.
    """
    if not any(mode == OFFLOAD for _, mode in draft.counts):
        return 0
    return max(
        bytes_
        for member in member_plans(batch, draft, cost)
        for bytes_ in cost.layout.placement.of_ranks(
            host_peak_bytes(cost, member.plan, member.loads)
        )
    )


def _member_plan(batch: SortedBatch, draft: Draft, member: Chunking, cost: Cost) -> MemberPlan:
    assignment = tuple(sorted(batch.names[d] for d in np.unique(member.spans.document)))
    local = {document: number for number, document in enumerate(assignment)}
    # -1: document of another replica, which is not used.
    names = tuple(local.get(document, -1) for document in batch.names)
    documents = tuple(batch.documents[document] for document in assignment)
    member_batch = SortedBatch(batch.lengths, names, documents, batch.trees)
    plan = plan_of(member_batch, dataclasses.replace(draft, chunking=member), cost)
    return MemberPlan(
        assignment, plan, member_batch.named(loads_of(member, batch.lengths, cost.multiple))
    )


def tables_in_step(members: tuple[MemberPlan, ...], draft: Draft, cost: Cost) -> tuple[Table, ...]:
    """Return a table per replica: with its own bytes, but the seconds of the slowest replica."""
    counts = with_unrecomputed(cost, draft.counts, draft.chunking.count)
    return in_step([cost.table_of(member.loads, counts) for member in members])


def emit_block(
    planner: str, batch: SortedBatch, draft: Draft, cost: Cost, options: Options
) -> PlannedBlock:
    """Return the plans of a lockstep group with their predicted times and memory.

    The simulation also checks the plans by the rules of ``ir.check``.

    Args:
        planner: name of the planner.
        batch: the documents, sorted by length.
        draft: the common plan as arrays.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
    """
    members = member_plans(batch, draft, cost)
    local = any(chunk.has_local for member in members for chunk in member.plan.chunks)
    bound = block_bound_seconds(batch.lengths, cost, options.lockstep, local, batch.starts)
    planned = []
    for member, table in zip(members, tables_in_step(members, draft, cost), strict=True):
        played = play(member.plan, table)
        peaks = played.peak_bytes
        predicted = Prediction(played.seconds, tuple(peak / GIB for peak in peaks), planner)
        planned.append(
            PlannedReplica(
                planner=planner,
                plan=dataclasses.replace(member.plan, predicted=predicted),
                seconds=played.seconds,
                lower_bound_seconds=bound,
                bubble_ratio=played.bubble_ratio,
                recompute_ratio=played.recompute_ratio,
                comm_ratio=played.comm_ratio,
                peak_bytes=peaks,
                chunks=draft.chunking.count,
                pipelines=draft.pipelines,
                fits=all(p <= b for p, b in zip(peaks, cost.device_budget_bytes, strict=True)),
                levers=tuple(sorted(options.levers)),
                note=draft.note,
                packing_tokens=draft.packing_tokens,
            )
        )
    return PlannedBlock(tuple(member.assignment for member in members), tuple(planned))
