"""Preparation of chunkings for simulation: seconds, bytes and recompute choices as arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import ChunkingParams
from megatron_epp.planner.epp import progress
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.list_scheduler import Policy, list_schedule
from megatron_epp.planner.order.problem import (
    ChunkProblems,
    ScheduleProblem,
    every_layer,
    left_layers,
    loads_of,
)
from megatron_epp.planner.order.warmup import (
    placed_window,
    shrinking_in_flight,
)
from megatron_epp.planner.recompute import ilp, offload
from megatron_epp.planner.recompute.choices import diagonal_counts, ladders
from megatron_epp.planner.recompute.ilp import Solver

# Effort charged, in simulated ops: CHUNKING_OPS per chunking, OPS_PER_NUMBER per array element, and
# PROGRAM_OPS per recompute program. Chosen by hand; only the magnitude matters.
CHUNKING_OPS = 15_000
OPS_PER_NUMBER = 4
PROGRAM_OPS = 40_000
# Array elements (stages times chunks or documents) of tables that are computed together. Larger
# tables would save little time and take more memory.
NUMBERS_AT_ONCE = 100_000
# Simulated ops per unit of --epp-effort. A core does 15 to 20 million per second, so a unit takes
# about a tenth of a second.
OPS_PER_EFFORT = 1_500_000


class Effort:
    """Number of ops that a search may still simulate.

    Other work of the search counts as a number of ops. No time is measured, so plans are
    reproducible.
    """

    def __init__(self, effort: int):
        self.left = float(effort * OPS_PER_EFFORT)

    def spend(self, ops: float) -> None:
        """Subtract a number of ops from the ops that are left."""
        self.left -= ops
        progress.report_effort(spent=ops)

    @property
    def spent(self) -> bool:
        """Whether no ops are left."""
        return self.left <= 0


@dataclass(frozen=True, slots=True, eq=False)
class PreparedChunking:
    """A chunking with its recompute choices, ready for simulation.

    Attributes:
        chunking: the chunks.
        loads: numbers of tokens and query-key pairs of the chunks.
        counts: number of layers [stages, chunks] by (layer kind, recompute mode).
        problems: scheduling problems of the chunks, for any ``counts``.
        work: the scheduling problem for ``counts``.
        min_in_flight: [stages, chunks] least number of forwards before each backward
            (planner.order.warmup), or [ranks, backwards] if ranks have several stages.
    """

    chunking: Chunking
    loads: Loads
    counts: Counts
    problems: ChunkProblems
    work: ScheduleProblem
    min_in_flight: np.ndarray


# The values are a prepared chunking and the ops charged for its preparation.
PreparedChunkings = dict[ChunkingParams, tuple[PreparedChunking, float]]


class Preparation:
    """Preparation of chunkings for one batch and one cost model, with the levers of ``options``.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        halves: whether to compute seconds and bytes of I and W, too.
        host: limit of host memory for offloaded layers; None: the host budget of ``cost``.
    """

    def __init__(
        self,
        batch: SortedBatch,
        cost: Cost,
        options: Options,
        halves: bool = True,
        host: offload.HostHeadroom | None = None,
    ):
        self.host = offload.HostHeadroom(cost.host_budget_bytes) if host is None else host
        self.batch, self.cost, self.options = batch, cost, options
        self.levers, self.halves = options.levers, halves
        self.effort = Effort(options.search_effort)
        self.solver = Solver()

    def work(self, problems: ChunkProblems, counts: Counts) -> ScheduleProblem:
        """Return the scheduling problem for the recompute ``counts``, and charge its effort."""
        self._spend_work(problems.chunking.count)
        return problems.of(counts)

    def _spend_work(self, chunks: int) -> None:
        self.effort.spend(CHUNKING_OPS + OPS_PER_NUMBER * self.cost.layout.stages * chunks)

    def problems(self, chunkings: Sequence[Chunking]) -> list[ChunkProblems]:
        """Return the scheduling problems of several chunkings, prepared together."""
        lengths, multiple = self.batch.lengths, self.cost.multiple
        loads = [loads_of(each, lengths, multiple) for each in chunkings]
        numbers = self.cost.layout.stages * (len(lengths) + max(each.count for each in chunkings))
        some = max(1, NUMBERS_AT_ONCE // numbers)
        return [
            problems
            for at in range(0, len(chunkings), some)
            for problems in ChunkProblems.of_each(
                self.cost, chunkings[at : at + some], loads[at : at + some], self.halves
            )
        ]

    def prepare(
        self,
        chunking: Chunking,
        *,
        bare: bool = False,
        hopeless: Callable[[PreparedChunking], bool] = lambda kept: False,
        problems: ChunkProblems | None = None,
    ) -> PreparedChunking | None:
        """Return the chunking with the least recompute with which 1F1B fits in memory.

        If no recompute suffices, only one document at a time is assumed to be in flight. If that
        does not suffice either, all layers are recomputed.

        Args:
            chunking: the chunks.
            bare: whether to assume from the start that one document at a time is in flight.
            hopeless: function that returns True if no plan can be good enough; the result is then
                None. Its argument is the chunking without recompute. It is only called if that does
                not fit, layers may not be offloaded, and ranks have one stage.
            problems: scheduling problems of the chunking, if they exist already.
        """
        problems = problems or self.problems([chunking])[0]
        loads = problems.loads
        work = self.work(problems, {})
        place, stages = self.cost.layout.place, self.cost.layout.stages
        if place:
            min_in_flight = placed_window(chunking.sizes, place, chunking.widths)
            bare_limit = np.zeros_like(min_in_flight)  # only the forwards that a backward requires
        else:
            min_in_flight = shrinking_in_flight(chunking.sizes, stages, chunking.widths)
            needed = chunking.last_of_group[chunking.backward] + 1
            bare_limit = np.repeat(needed[None], stages, axis=0)
        laws = [bare_limit] if bare else [min_in_flight, bare_limit]
        kept = PreparedChunking(chunking, loads, {}, problems, work, min_in_flight)
        # ``hopeless`` is not called with offloading, whose cost is unknown at this point, or with
        # several stages per rank, whose orders are sometimes faster with little memory.
        asked = "offload" not in self.levers and not place
        if asked and not _within(work, laws[0]).all() and hopeless(kept):
            self.effort.spend(PROGRAM_OPS)  # charged as if the chunking had been prepared
            self._spend_work(chunking.count)
            return None
        counts: Counts | None = None
        for least in laws:
            counts = self._least_counts(problems, work, least)
            if counts is not None:
                break
        if counts is None:
            counts = every_layer(FULL, left_layers(self.cost, {}, chunking.count))
        if counts:
            self.effort.spend(PROGRAM_OPS)
            work = self.work(problems, counts)
        return dataclasses.replace(kept, counts=counts, work=work)

    def _least_counts(
        self, problems: ChunkProblems, kept: ScheduleProblem, least: np.ndarray
    ) -> Counts | None:
        """Return the least recompute and offloading for an in-flight limit; None if none fits."""
        if _within(kept, least).all():
            return {}
        chunking, loads = problems.chunking, problems.loads
        steps = ladders(self.cost, loads)

        def recompute(
            work: ScheduleProblem, layers: list[np.ndarray] | None = None
        ) -> Counts | None:
            if self.cost.layout.place:
                return self._fewest_layers(problems, offloaded, least)
            return diagonal_counts(
                self.solver,
                self.cost,
                loads,
                work,
                least,
                integer=False,
                steps=steps,
                layers=layers,
            )

        offloaded: Counts = {}
        if "offload" in self.levers:
            offloaded = offload.layers_offloaded(
                self.cost, loads, self.host, least, kept.backward_order
            )
            left = left_layers(self.cost, offloaded, chunking.count)
            # A stage does not offload if layers in transfer leave no headroom even with all other
            # layers recomputed. This sometimes happens on the last stage, because of its logits.
            smallest = self.work(problems, {**offloaded, **every_layer(FULL, left)})
            there = _within(smallest, least)[:, None]
            offloaded = {choice: grid * there for choice, grid in offloaded.items()}
            if any(grid.any() for grid in offloaded.values()):
                left = left_layers(self.cost, offloaded, chunking.count)
                again = recompute(self.work(problems, offloaded), left)
                if again is not None:
                    return {**offloaded, **again}
            offloaded = {}
        return recompute(kept)

    def _fewest_layers(
        self, problems: ChunkProblems, offloaded: Counts, least: np.ndarray
    ) -> Counts | None:
        """Return the least number of layers to recompute everywhere; None if no number fits."""
        left = left_layers(self.cost, offloaded, problems.chunking.count)
        low, high = 1, max(self.cost.layout.layers)
        counts: Counts | None = None
        while low <= high:
            middle = (low + high) // 2
            tried = self.first_layers(left, FULL, middle)
            if _within(self.work(problems, {**offloaded, **tried}), least).all():
                counts, high = tried, middle - 1
            else:
                low = middle + 1
        return counts

    def first_layers(self, left: list[np.ndarray], mode: str, layers: int) -> Counts:
        """Return counts: ``layers`` layers a stage with ``mode``, at most ``left[k]`` of kind k."""
        first = np.minimum(np.sum(left, axis=0), layers)
        by_kind = self.cost.layout.kinds.from_front(np.zeros_like(first), first)
        return {(k, mode): np.minimum(by_kind[k], grid) for k, grid in enumerate(left)}

    def recounted(self, prepared: PreparedChunking, counts: Counts) -> PreparedChunking | None:
        """Return ``prepared`` with recompute ``counts``; None if no effort is left."""
        if self.effort.spent:
            return None
        counts = {mode: grid for mode, grid in counts.items() if grid.any()}
        work = self.work(prepared.problems, counts)
        return dataclasses.replace(prepared, counts=counts, work=work)


def _within(work: ScheduleProblem, least: np.ndarray) -> np.ndarray:
    """Return for each stage whether ``work`` fits in memory with the in-flight limit ``least``.

    With several stages per rank, the list scheduler lowers the limit where memory requires it.
    """
    if work.place:
        everything = np.full_like(least, work.stages * work.chunks)
        peaks = list_schedule(work, Policy(np.zeros_like(least), least, everything)).peak_bytes
        return (peaks <= work.headroom_bytes)[list(work.place)]
    return ilp.within(least, work.backward_order, *work.of_in_flight)
