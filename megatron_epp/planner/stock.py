"""Stock: the fastest of Megatron-LM's own schedules for a job, the baseline of ``--epp``.

Stock packs whole documents. :func:`stock_of` plans the batches with each of Megatron's ways to run
them, and returns the fastest that fits in memory:

- one stage per rank, or 2, 3 or 4 interleaved stages per rank;
- layers divided evenly or balanced by time (both with ``--pipeline-model-parallel-layout``);
- no recompute, or uniform recompute of as few layers as memory allows (``--recompute-num-layers``);
- with one or two stages per rank, also with Megatron's overlap of communication
  (:mod:`cost.overlap <megatron_epp.cost.overlap>`).

Stock does not use what Megatron-LM 0.19 refuses:

- interleaved stages with fewer micro-batches than ranks (``core/pipeline_parallel/schedules.py``).
  All larger numbers run with ``--microbatch-group-size-per-virtual-pipeline-stage``;
- the overlap of experts' all-to-all on several ranks with one stage each, or with recompute
  (``core/transformer/transformer_config.py``).

All batches have the same placement and layers. Every batch is packed to its own best length, which
Megatron cannot do, so no job of Megatron is faster than stock. ``Stock.static`` is the nearest job
that Megatron runs, with one length and one number of recomputed layers for all batches.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.overlap import overlap_text, overlapped, overlaps, overlaps_experts
from megatron_epp.ir.placement import EVENLY, Placement
from megatron_epp.planner.choose.choice import placed_cost, with_placement
from megatron_epp.planner.choose.partition import expected_features, fastest_layers, with_layers
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.published.schedules import (
    PACKING,
    Published,
    packed,
    packed_to_lengths,
    packing_lengths,
)
from megatron_epp.planner.recompute.uniform import ScoredDraft

# Most stages a rank first: they are usually the fastest, and rule out others without plans.
PLACEMENTS = ("interleaved 4", "interleaved 3", "interleaved 2", EVENLY)
OVERLAPPED = ("interleaved 2", EVENLY)  # placements that are also planned with overlap


@dataclass(frozen=True, slots=True)
class Packed:
    """How documents are packed, in one batch or in all batches.

    Attributes:
        seconds: predicted seconds of an iteration.
        tokens: length to which documents are packed, in tokens.
        recomputed: number of layers that every stage recomputes.
    """

    seconds: float
    tokens: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Stock:
    """The fastest of Megatron's own schedules for a job.

    Attributes:
        placement: name of the placement.
        overlap: description of the communication that Megatron overlaps; "" if none.
        cost: cost model with this placement, its layers and its overlap.
        batches: packing of every batch, each at its best length.
        static: packing of the job with one length and one number of recomputed layers for all
            batches; its ``seconds`` are the mean over the batches. None if no such job fits in
            memory.
    """

    placement: str
    overlap: str
    cost: Cost
    batches: tuple[Packed, ...]
    static: Packed | None

    def __str__(self) -> str:
        """Return placement, lengths, recompute and overlap in words."""
        where = self.placement
        if where == EVENLY:
            where = "one stage a rank" if self.cost.layout.stages > 1 else "no pipeline"
        tokens = _range([each.tokens for each in self.batches])
        layers = _range([each.recomputed for each in self.batches])
        recompute = "no recompute" if layers == "0" else f"{layers} layers recomputed"
        parts = where, f"packed to {tokens} tokens", recompute, self.overlap
        return ", ".join(filter(None, parts))

    def facts(self) -> dict:
        """Return the schedule and its static job for JSON."""
        return {
            "placement": self.placement,
            "layers": list(self.cost.layout.layers),
            "overlap": self.overlap,
            "batches": [dataclasses.asdict(each) for each in self.batches],
            "static": dataclasses.asdict(self.static) if self.static else None,
        }


def _range(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


@dataclass(frozen=True, slots=True)
class MegatronSetup:
    """Stages, layers and overlap with which Megatron can run a job; fields as in :class:`Stock`."""

    placement: str
    overlap: str
    cost: Cost

    @property
    def one_length(self) -> bool:
        """Whether all batches are packed to the context: the overlap's buffers have one shape."""
        return bool(self.overlap) and not overlaps_experts(self.cost)

    def schedule(self, tokens: int | None = None, recomputed: int = 0) -> Published:
        """Return the schedule in the form of the published schedules.

        Args:
            tokens: length in tokens to which documents are packed; None: the best length of the
                batch, or the context if :attr:`one_length`.
            recomputed: minimum number of layers that every stage recomputes.
        """
        least = 1 if self.placement == EVENLY else self.cost.layout.placement.ranks

        def chunkings(
            batch: SortedBatch, cost: Cost, options: Options
        ) -> Iterator[tuple[Chunking, str, int]]:
            if tokens is not None:
                options = dataclasses.replace(options, context=tokens)
            lengths = packed_to_lengths if tokens is None and not self.one_length else packed
            yield from (each for each in lengths(batch, cost, options) if each[0].count >= least)

        modes = () if self.overlap and not self.one_length else PACKING.modes
        return dataclasses.replace(PACKING, chunkings=chunkings, modes=modes, recomputed=recomputed)


def candidates(cost: Cost, batches: Sequence[Sequence[int]]) -> Iterator[MegatronSetup]:
    """Yield the placements, layers per stage and overlaps with which Megatron can run a job.

    Args:
        cost: cost model of the job; its placement and vocabulary parallelism do not matter.
        batches: document lengths of one replica in each batch, in tokens; the layers are balanced
            for their mean load.
    """
    ranks = cost.layout.placement.ranks
    its = cost.with_vocabulary(False).replace(stacked_experts=False)
    one = with_placement(its, Placement(tuple(range(ranks))))
    for name in PLACEMENTS if ranks > 1 else (EVENLY,):
        placed = one if name == EVENLY else placed_cost(one, name)
        if placed is None:  # fewer layers than stages
            continue
        by_time = fastest_layers(placed, expected_features(placed, batches))
        for layers in dict.fromkeys((by_time or placed.layout.layers, placed.layout.layers)):
            moved = with_layers(placed, layers)
            if moved is None:  # the model states do not fit
                continue
            if name in OVERLAPPED and _may_overlap(moved):
                yield MegatronSetup(name, overlap_text(moved), overlapped(moved))
            yield MegatronSetup(name, "", moved)


def _may_overlap(cost: Cost) -> bool:
    """Return whether Megatron has an overlap for the job, and accepts it on this placement."""
    placement = cost.layout.placement
    one_stage = placement.ranks > 1 and not placement.shares_ranks
    return overlaps(cost) and not (one_stage and overlaps_experts(cost))


def stock_of(
    batches: Sequence[Sequence[int]],
    cost: Cost,
    options: Options,
    progress: Callable[[list[MegatronSetup], int, str], Iterator[MegatronSetup]] | None = None,
) -> Stock:
    """Return the fastest of Megatron's own schedules.

    Args:
        batches: document lengths in tokens of one replica, or of one lockstep group, in each batch.
        cost: cost model of the job.
        options: planner options; only ``context`` and ``lockstep`` matter.
        progress: function that is called with a list, its length and a title. It returns an
            iterator over the list that shows a progress bar. None: no bar.

    Raises:
        ValueError: if no schedule fits the memory budget, a batch has no documents, or a length is
            less than 1.
    """
    each = [SortedBatch.of(lengths) for lengths in batches]
    tried = list(candidates(cost, batches))
    best: tuple[float, MegatronSetup, list[Packed]] | None = None
    for candidate in progress(tried, len(tried), "stock") if progress else tried:
        packings = _packed(each, candidate, options, best[0] if best else np.inf)
        if packings is not None:
            best = sum(one.seconds for one in packings), candidate, packings
    if best is None:
        raise ValueError("none of Megatron's own schedules fits the memory budget")
    _, candidate, packings = best
    static = _static(each, candidate, options) if len(packings) > 1 else packings[0]
    return Stock(candidate.placement, candidate.overlap, candidate.cost, tuple(packings), static)


def _packed(
    batches: Sequence[SortedBatch],
    candidate: MegatronSetup,
    options: Options,
    below: float = np.inf,
    tokens: int | None = None,
    recomputed: int = 0,
) -> list[Packed] | None:
    """Return the packing of every batch; None if Megatron refuses a batch, or it does not fit.

    The result is also None if the batches take ``below`` seconds or more. ``tokens`` and
    ``recomputed`` are those of :meth:`MegatronSetup.schedule`.
    """
    schedule = candidate.schedule(tokens, recomputed)
    packings: list[Packed] = []
    for batch in batches:
        left = below - sum(one.seconds for one in packings)
        drafted = schedule.draft(batch, candidate.cost, options, left)
        if drafted is None or drafted.over_bytes > 0 or drafted.seconds >= left:
            return None
        packings.append(
            Packed(drafted.seconds, drafted.draft.packing_tokens, _recomputed_layers(drafted))
        )
    return packings


def _static(
    batches: Sequence[SortedBatch], candidate: MegatronSetup, options: Options
) -> Packed | None:
    """Return the packing of all batches to one length, with one recompute; None if none fits."""
    longest, context = max(int(batch.lengths[0]) for batch in batches), options.context
    every = packing_lengths(longest, context)
    best: tuple[float, int, int] | None = None
    for tokens in every if not candidate.one_length else (max(longest, context),):
        job = batches, candidate, options, best[0] if best else np.inf, tokens
        packings = _packed(*job)
        most = max(each.recomputed for each in packings) if packings else 0
        if packings and min(each.recomputed for each in packings) < most:
            packings = _packed(*job, most)
        if packings:
            best = sum(each.seconds for each in packings), tokens, most
    return Packed(best[0] / len(batches), *best[1:]) if best else None


def _recomputed_layers(drafted: ScoredDraft) -> int:
    """Return the number of layers of every stage that a draft with uniform recompute recomputes."""
    grids = list(drafted.draft.counts.values())
    return int(np.sum(grids, axis=0).max()) if grids else 0
