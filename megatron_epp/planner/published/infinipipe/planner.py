"""InfiniPipe as published: Alg. 1, search over K, grouping into pipelines, diagonal program.

K is the number of slices of the longest document. The paper is ambiguous in one point. T_m of
Alg. 1 can mean the tokens of the first slice, or the tokens of short documents that take as long as
a slice. Both readings are tried. Eq. 13 predicts the time of each reading and each K, and the best
prediction is chosen without simulation. The search solves the relaxed program and rounds up. The
chosen pipelines are solved as integer programs with the paper's gap of 2%.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL
from megatron_epp.planner.chunks.bin_packing import alg1
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.chunking import Chunking, assemble
from megatron_epp.planner.chunks.slicing import Rates, cut_at, equal_points
from megatron_epp.planner.feasibility import most_tokens
from megatron_epp.planner.lower_bound import ordered_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import PolicyParams
from megatron_epp.planner.order.problem import (
    ChunkProblems,
    Counts,
    every_layer,
    left_layers,
    loads_of,
    rates_of,
)
from megatron_epp.planner.order.warmup import pipelines
from megatron_epp.planner.published.infinipipe.grouping import RecomputeIlps, group
from megatron_epp.planner.recompute.ilp import Solver
from megatron_epp.planner.recompute.uniform import ScoredDraft, strict

# K; the paper gives no grid, this one is chosen by hand
SLICE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# Shorter slices are not tried, unless the longest document itself is short.
LEAST_SLICE_TOKENS = 1024
# The paper's memory model is not exact. If a plan's exact peak exceeds the budget, its stages are
# solved again with the budget reduced by the excess and a little more, at most TIGHTENINGS times. K
# and the grouping stay as long as they fit. Both numbers are chosen by hand.
TIGHTENINGS = 8
TIGHTENED_BY = 1.01


@dataclass(frozen=True, slots=True, eq=False)
class GroupedChunking:
    """A chunking with the best grouping of its documents into pipelines.

    Attributes:
        ilps: recompute programs of the chunking.
        cuts: groups at which another pipeline begins.
        seconds: seconds of warm-ups and recompute by eq. 13, plus those of all chunks. The latter
            depend on K, because a part of every chunk's time is constant.
        note: description of the chunking.
    """

    ilps: RecomputeIlps
    cuts: tuple[int, ...]
    seconds: float
    note: str


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return InfiniPipe's draft (plan as arrays), or None if it cannot take less than ``below``.

    Integer programs are solved only if some chunking has a lower bound less than ``below``. The
    chosen chunking is simulated only if its own lower bound is less than ``below``, too.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options; only ``lockstep`` matters.
        below: seconds of an iteration; the caller needs only a draft that takes less.
    """

    def bound(chunking: Chunking) -> float:
        loads = loads_of(chunking, batch.lengths, cost.multiple)
        return ordered_bound_seconds(chunking, loads, cost)

    if np.isfinite(below) and all(
        bound(chunking) >= below for chunking, _ in chunkings(batch, cost, options, rates_of(cost))
    ):
        return None
    full_headroom = cost.headroom_bytes
    headroom, solver = full_headroom, Solver()
    best: GroupedChunking | None = None
    for _ in range(TIGHTENINGS):
        counts = None if best is None else best.ilps.counts(best.cuts, headroom)
        if counts is None:
            best = best_grouping(solver, batch, cost, options, headroom)
            counts = None if best is None else best.ilps.counts(best.cuts, headroom)
        if best is None or counts is None:
            break
        if np.isfinite(below) and bound(best.ilps.chunking) >= below:
            return None
        played, peaks = _play(batch, best.ilps.chunking, best.cuts, counts, best.note, cost)
        if played.over_bytes <= 0:
            return played
        if played.seconds >= below:
            return None  # more recompute is not faster
        headroom = headroom - np.maximum(peaks - full_headroom, 0.0) * TIGHTENED_BY
    return _anything_that_fits(batch, cost, options)


def _anything_that_fits(batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    """Return the fastest draft that fits in memory with all layers recomputed.

    The draft has one pipeline, or one pipeline per group (sliced document or pack). This function
    is called if InfiniPipe's memory model finds no draft that fits.
    """
    best: ScoredDraft | None = None
    for chunking, note in chunkings(batch, cost, options, rates_of(cost)):
        everything = every_layer(FULL, left_layers(cost, {}, chunking.count))
        for cuts in ((), tuple(range(1, chunking.groups))):
            description = f"{note}, all layers recomputed"
            played, _ = _play(batch, chunking, cuts, everything, description, cost)
            best = played if best is None else min(best, played, key=lambda scored: scored.rank)
    assert best is not None, "there is at least one chunking"
    return best


def chunkings(
    batch: SortedBatch, cost: Cost, options: Options, rates: Rates
) -> Iterator[tuple[Chunking, str]]:
    """Yield the chunkings by Alg. 1, with descriptions: every K and both readings of T_m.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options; only ``lockstep`` matters.
        rates: seconds per token, query-key pair and chunk.
    """
    longest = int(batch.lengths[0])
    capacity = most_tokens(cost)
    least = min(LEAST_SLICE_TOKENS, longest / SLICE_COUNTS[-1])
    for slices in SLICE_COUNTS:
        if longest / slices < least:
            break
        points = equal_points(longest, slices, rates, cost.multiple)
        if len(points) != slices + 1 or (points[1] > capacity and slices < SLICE_COUNTS[-1]):
            continue
        target = float(rates.document_seconds(batch.lengths[:1])[0]) / slices
        cuts = cut_at(batch.lengths, points)
        first = int(points[1])
        equal = _equal_tokens(cuts.shorts.tokens, rates, target)
        limits = {first: "as the first slice"}
        limits.setdefault(max(first, equal), "that take as long as a slice")
        for limit, how in limits.items():
            bucket, buckets = alg1(cuts, rates, target, min(limit, capacity))
            chunking = folded(assemble(cuts, bucket, buckets, rates), options.lockstep, rates)
            packs = f"packs of {min(limit, capacity)} tokens {how}"
            yield chunking, f"slices of the longest document: {slices}, {packs}"


def _equal_tokens(shorts: np.ndarray, rates: Rates, target: float) -> int:
    """Return the number of tokens of short documents that take ``target`` seconds in total."""
    if not len(shorts):
        return 0
    return int(target * shorts.sum() / rates.document_seconds(shorts).sum())


def best_grouping(
    solver: Solver,
    batch: SortedBatch,
    cost: Cost,
    options: Options,
    headroom_bytes: np.ndarray,
) -> GroupedChunking | None:
    """Return the chunking and grouping with the least predicted time, or None if none fits.

    Args:
        solver: solver of the integer programs.
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options; only ``lockstep`` matters.
        headroom_bytes: [stages] bytes available besides the model states.
    """
    rates = rates_of(cost)
    best = None
    for chunking, note in chunkings(batch, cost, options, rates):
        loads = loads_of(chunking, batch.lengths, cost.multiple)
        work = float(
            rates.chunk_spans_seconds(
                chunking.spans, chunking.chunk, loads.tokens, loads.pairs
            ).sum()
        )
        work += chunking.count * rates.chunk_seconds
        delta = (cost.layout.stages - 1) * work / chunking.count
        below = np.inf if best is None else best.seconds - work
        if delta >= below:
            continue  # recompute and more pipelines only add time
        ilps = RecomputeIlps(solver, chunking, loads, cost, headroom_bytes)
        grouped = group(ilps, delta, below)
        if grouped is None:
            continue
        cuts, overhead = grouped
        if overhead < below:
            best = GroupedChunking(ilps, cuts, work + overhead, note)
    return best


def _play(
    batch: SortedBatch,
    chunking: Chunking,
    cuts: tuple[int, ...],
    counts: Counts,
    note: str,
    cost: Cost,
) -> tuple[ScoredDraft, np.ndarray]:
    """Return the simulated draft, and its exact peak bytes [stages] without model states."""
    loads = loads_of(chunking, batch.lengths, cost.multiple)
    in_flight_limit = pipelines(chunking.sizes, list(cuts), cost.layout.stages)
    work = ChunkProblems(cost, chunking, loads, split=False).of(counts)
    schedule = list_schedule(work, strict(in_flight_limit))
    note = f"schedule infinipipe, {note}; {PolicyParams(strict=True)}"
    drafted = Draft(
        chunking, counts, schedule.kinds, schedule.chunks, pipelines=len(cuts) + 1, note=note
    )
    return ScoredDraft(schedule.seconds, schedule.over_bytes, drafted), schedule.peak_bytes
