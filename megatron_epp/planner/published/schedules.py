"""Published schedules, as a table: chunks, order of ops, and recompute of each.

For each batch, simulation chooses chunk sizes and warm-ups, so these are strong baselines.
Placement and layers per stage are those of the job.

- ``seq1f1b``: as in InfiniPipe's baseline, chunks of one size and uniform recompute. The original
  Seq1F1B slices every sequence into the same number of slices, which does not suit varying lengths.
- ``chunkflow``: chunks of one size. The last K chunks of a document save all activations; earlier
  chunks only save the inputs of layers, and recompute all layers.
- ``packing``: unsliced documents packed to the context, the simplest baseline, and the fallback if
  another planner fails. ``packing-best``: packed to the best length for the batch, because packing
  few tokens to the context leaves most ranks idle.
- ``1f1b`` (arXiv 2104.04473): packed, with Megatron's warm-up; interleaved if ranks have several
  stages.
- ``zb-v`` (arXiv 2401.10241): packed, for V placements; backwards are split, and as many forwards
  are in flight as with 1F1B.
- ``adaptis`` (arXiv 2509.23722): packed; simulation chooses the warm-up, and whether to split
  backwards.
- ``slimpipe`` (arXiv 2504.14519) without its context exchange: all slices have the same size. A
  document that is as long as the context has n slices, a multiple of the number of ranks.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL, OFFLOAD
from megatron_epp.planner.chunks.bin_packing import first_fit
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.chunking import Chunking, assemble
from megatron_epp.planner.chunks.slicing import Rates, cut_at
from megatron_epp.planner.lower_bound import ordered_bound_seconds, work_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.compiled import F, I, W
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.emit_block import most_host_bytes
from megatron_epp.planner.order.list_scheduler import Schedule
from megatron_epp.planner.order.policies import warm_up_policies, warm_up_policy, warm_up_text
from megatron_epp.planner.order.problem import ChunkProblems, Counts, loads_of, rates_of
from megatron_epp.planner.order.warmup import constant, interleaved_warm_up, shrinking_in_flight
from megatron_epp.planner.recompute.uniform import (
    NotedPolicy,
    ScoredDraft,
    best_schedule,
    better,
    one_f_one_b,
    scored_draft,
    uniform_draft,
)

Place = tuple[int, ...]  # rank of every stage

LEAST_CHUNK_TOKENS = 1024
STEP = 2**0.5  # factor between chunk sizes, from the context down; finer steps change little
SIZES = 12
GROWTH = 2**0.25  # factor between packing lengths; finer steps change little
RANK_SLICES = (1, 2, 4)  # of SlimPipe: factors on the number of ranks
MOST_SLICES = 2048


def any_place(place: Place) -> bool:
    """Return True for every placement."""
    return True


def one_stage_a_rank(place: Place) -> bool:
    """Return whether stage i is on rank i."""
    return place == tuple(range(len(place)))


def is_interleaved(place: Place) -> bool:
    """Return whether stages are assigned to ranks round-robin."""
    ranks = max(place) + 1
    return place == tuple(range(ranks)) * (len(place) // ranks)


def is_v(place: Place) -> bool:
    """Return whether the ranks of the stages form a V: each rank once, then again in reverse."""
    half = len(place) // 2
    return half > 0 and sorted(place[:half]) == list(range(half)) and place == place[::-1]


@dataclass(frozen=True, slots=True)
class Published:
    """A published schedule.

    Attributes:
        name: name of the planner.
        chunkings: function that yields the chunkings to try, each with a description and, if
            documents are packed, the packing length in tokens (else 0).
        policies: function that returns the policies or orders to try for a chunking. Its last
            argument is whether backwards may be split.
        modes: recompute modes; the first mode with which a plan fits is used. Without a mode,
            nothing is recomputed.
        saving: values of ChunkFlow's K to try: only the last K chunks of a document save
            activations. (): recompute is uniform.
        splits: whether policies may split backwards.
        compared: whether ``compare`` shows the planner by default.
        takes: function that returns whether the schedule supports a placement.
        placements: description of the supported placements, for error messages.
        recomputed: minimum number of layers of every stage that are recomputed.
    """

    name: str
    chunkings: Callable[[SortedBatch, Cost, Options], Iterator[tuple[Chunking, str, int]]]
    policies: Callable[[Chunking, Cost, bool], Iterable[NotedPolicy]]
    modes: tuple[str, ...] = (FULL,)
    saving: tuple[int, ...] = ()
    splits: bool = False
    compared: bool = True
    takes: Callable[[Place], bool] = any_place
    placements: str = "any"
    recomputed: int = 0

    def draft(
        self,
        batch: SortedBatch,
        cost: Cost,
        options: Options,
        below: float = np.inf,
        split: bool = True,
    ) -> ScoredDraft | None:
        """Return the fastest draft (plan as arrays), with the least recompute that fits.

        Args:
            batch: the documents, sorted by length.
            cost: cost model, including the stages and parallel degrees.
            options: planner options, such as levers and effort.
            below: seconds of an iteration; the caller needs only a draft that takes less.
            split: whether backwards may be split, if the schedule splits them.

        Returns:
            The draft, which may not fit in memory; None if lower bounds show that no draft is
            faster than ``below``.
        """
        offloads = "offload" in options.levers and cost.layout.profile.host_bytes_per_second > 0
        modes = [mode for mode in self.modes if mode != OFFLOAD or offloads]
        best: ScoredDraft | None = None
        for chunking, chunks, tokens in self.chunkings(batch, cost, options):
            note = f"schedule {self.name}, {chunks}"
            loads = loads_of(chunking, batch.lengths, cost.multiple)
            if self.splits and split:
                bound = work_bound_seconds(loads, cost)
            else:
                bound = ordered_bound_seconds(chunking, loads, cost)
            if not better(best, bound, below):
                continue
            policies = list(self.policies(chunking, cost, split))
            problems = ChunkProblems(cost, chunking, loads, self.splits and split)
            if not self.saving:
                drafts = iter([uniform_draft(problems, policies, note, modes, self.recomputed)])
            else:
                drafts = _saving(problems, policies, note, self.saving)
            for drafted in drafts:
                if most_host_bytes(batch, drafted.draft, cost) > cost.host_budget_bytes:
                    on_device = [mode for mode in modes if mode != OFFLOAD]
                    drafted = uniform_draft(problems, policies, note, on_device)
                if best is None or drafted.rank < best.rank:
                    packed = dataclasses.replace(drafted.draft, packing_tokens=tokens)
                    best = dataclasses.replace(drafted, draft=packed)
                if not better(best, bound, below):
                    break
        return best


# ------------------------------------------------------------------ chunks


def _folded(chunking: Chunking, cost: Cost, options: Options) -> Chunking:
    return folded(chunking, options.lockstep, rates_of(cost))


def _context(batch: SortedBatch, options: Options) -> int:
    return max(options.context, int(batch.lengths[0]))


def packed(batch: SortedBatch, cost: Cost, options: Options) -> Iterator[tuple[Chunking, str, int]]:
    """Yield the chunks of unsliced documents packed first-fit to the context."""
    tokens = _context(batch, options)
    chunking = packed_chunks(batch.lengths, tokens, rates_of(cost))
    yield _folded(chunking, cost, options), f"documents packed to {tokens} tokens", tokens


def packing_lengths(longest: int, context: int) -> Iterator[int]:
    """Yield the packing lengths to try, in tokens, from ``longest`` to ``context``."""
    tokens = float(longest)
    while tokens < context:
        yield int(tokens)
        tokens *= GROWTH
    yield max(longest, context)


def packed_to_lengths(
    batch: SortedBatch, cost: Cost, options: Options
) -> Iterator[tuple[Chunking, str, int]]:
    """Yield the chunks of unsliced documents packed to several lengths."""
    for tokens in packing_lengths(int(batch.lengths[0]), options.context):
        yield from packed(batch, cost, dataclasses.replace(options, context=tokens))


def _of_sizes(
    batch: SortedBatch, cost: Cost, options: Options
) -> Iterator[tuple[Chunking, str, int]]:
    """Yield chunks of several fixed sizes."""
    for size in sizes(_context(batch, options), cost.multiple):
        chunking = fixed_chunks(batch.lengths, size, rates_of(cost))
        yield _folded(chunking, cost, options), f"chunks of {size} tokens", 0


def _of_slices(
    batch: SortedBatch, cost: Cost, options: Options
) -> Iterator[tuple[Chunking, str, int]]:
    """Yield SlimPipe's chunks, for several multiples of the number of ranks."""
    for number, times in enumerate(RANK_SLICES):
        each = -(-_context(batch, options) // (times * cost.layout.placement.ranks))
        size = -(-each // cost.multiple) * cost.multiple
        slices = fixed_chunks(batch.lengths, size, rates_of(cost))
        if number and slices.count > MOST_SLICES:
            break
        yield _folded(slices, cost, options), f"slices of {size} tokens", 0


def sizes(context: int, multiple: int) -> Iterator[int]:
    """Yield chunk sizes to try, multiples of ``multiple`` tokens, from context to about 1024."""
    seen = set()
    for power in range(SIZES):
        size = max(multiple, round(context / STEP**power / multiple) * multiple)
        if size not in seen and (power == 0 or size >= min(LEAST_CHUNK_TOKENS, context)):
            seen.add(size)
            yield size


def packed_chunks(lengths: np.ndarray, context: int, rates: Rates) -> Chunking:
    """Return chunks of at most ``context`` tokens, with unsliced documents packed first-fit.

    If the longest document has more tokens than ``context``, its length is the limit. ``lengths``
    [documents] are in tokens, in descending order.
    """
    longest = int(lengths[0])
    uncut = cut_at(lengths, np.array([0, longest]))
    bucket, buckets = first_fit(uncut, max(context, longest))
    return assemble(uncut, bucket, buckets, rates)


def fixed_chunks(lengths: np.ndarray, size: int, rates: Rates) -> Chunking:
    """Return chunks of ``size`` tokens: slices of long documents, and packs of the rest.

    A pack holds short documents and at most one tail (the last slice of a long document).
    ``lengths`` [documents] are in tokens, in descending order.
    """
    points = np.arange(0, int(lengths[0]) + size, size)
    cuts = cut_at(lengths, points)
    bucket, buckets = first_fit(cuts, size)
    return assemble(cuts, bucket, buckets, rates)


# ------------------------------------------------------------------ order of ops


def _constant(chunking: Chunking, cost: Cost, split: bool) -> list[NotedPolicy]:
    limit = constant(chunking.sizes, cost.layout.stages)
    return one_f_one_b(limit, chunking.sizes, cost)


def _shrinking(chunking: Chunking, cost: Cost, split: bool) -> list[NotedPolicy]:
    limit = shrinking_in_flight(chunking.sizes, cost.layout.stages)
    return one_f_one_b(limit, chunking.sizes, cost)


def _warm_ups(chunking: Chunking, cost: Cost, split: bool) -> Iterator[NotedPolicy]:
    splits = (True, False) if split else (False,)
    return warm_up_policies(cost.layout.placement.place, chunking.sizes, splits)


def _unsplit_warm_ups(chunking: Chunking, cost: Cost, split: bool) -> Iterator[NotedPolicy]:
    return _warm_ups(chunking, cost, False)


def _megatrons(chunking: Chunking, cost: Cost, split: bool) -> Iterator[NotedPolicy]:
    ranks, stages = cost.layout.placement.ranks, cost.layout.stages
    alone = ranks - 1 - np.arange(ranks)
    warm = (alone if stages == ranks else interleaved_warm_up(ranks, stages)) + 1
    return _held(chunking, cost, warm, split=False)


def _held(chunking: Chunking, cost: Cost, warm: np.ndarray, split: bool) -> Iterator[NotedPolicy]:
    """Yield two policies with ``warm`` [ranks] forwards in flight.

    The first policy never exceeds this number. Chunks differ in time, so a rank may have to wait if
    it strictly alternates F and B; the second policy then runs more forwards.
    """
    for strict in (True, False):
        flags = {"split": split, "deep": True, "strict": strict}
        said = f"{warm_up_text(**flags)}, warm-up of {warm[0]} forwards"
        yield warm_up_policy(cost.layout.placement.place, chunking.count, warm, **flags), said


def _zb_v(chunking: Chunking, cost: Cost, split: bool) -> Iterator[NotedPolicy]:
    ranks = cost.layout.placement.ranks
    yield from _held(chunking, cost, np.full(ranks, 2 * ranks), split=True)
    if not cost.layout.vocabulary_parallel:  # not covered by the paper
        yield zb_v_order(chunking, cost.layout.place), "the order of its paper"


def zb_v_order(chunking: Chunking, place: Place) -> Schedule:
    """Return ZB-V's own order of ops for every rank, without times.

    If F, I and W take the same time, this order has no bubbles. Source: arXiv 2401.10241, section
    6. If there are too few chunks to fill the V, the order for enough chunks is used, and the ops
    of missing chunks are left out.
    """
    ranks, count = len(place) // 2, chunking.count
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for down in range(ranks):
        up, after = 2 * ranks - 1 - down, ranks - down
        both = [(F, down), (I, down), (W, down), (F, up), (I, up), (W, up)]
        steps = [(F, down)] * (2 * after - 1) + [(F, up), (F, down)] * down
        steps += both[3:] * after + both * (max(count, 2 * ranks - 1) - ranks)
        steps += [(I, down), (I, up)] * down + [(I, down), (W, down)] * after
        steps += [(W, up)] * down + [(W, down)] * down
        ran: Counter[tuple[int, int]] = Counter()
        for kind, stage in steps:
            number = ran[kind, stage]
            ran[kind, stage] += 1
            if number < count:
                chunk = number if kind == F else int(chunking.backward[number])
                rows[place[down]].append((kind, chunk, stage))
    kinds, chunks, stages = np.array(rows).transpose(2, 0, 1)
    nothing, times = np.zeros(ranks), np.zeros(kinds.shape)
    ops = kinds.astype(np.int8), chunks.astype(np.int32), stages.astype(np.int32)
    return Schedule(np.inf, nothing, 0.0, *ops, times, times)


# ------------------------------------------------------------------ recompute


def _saving(
    problems: ChunkProblems, policies: list[NotedPolicy], note: str, saving: tuple[int, ...]
) -> Iterator[ScoredDraft]:
    """Yield a draft for each number of last chunks of a document that save activations."""
    chunking, cost = problems.chunking, problems.cost
    most = int(chunking.sizes.max())
    for kept in sorted({min(kept, most) for kept in saving}):
        counts = _discarded(cost, chunking, kept)
        schedule, how = best_schedule(problems, counts, policies)
        parts = note, f"chunks saved at the end of a document: {kept}"
        yield scored_draft(chunking, counts, schedule, cost, parts, how)


def _discarded(cost: Cost, chunking: Chunking, kept: int) -> Counts:
    """Return counts that recompute all layers, except in a document's last ``kept`` chunks."""
    early = chunking.last_of_group - np.arange(chunking.count) >= kept
    grid = np.outer(np.array(cost.layout.layers, dtype=np.float64), early)
    return cost.layout.kinds.first(FULL, grid)


ROWS = (
    SEQ1F1B := Published("seq1f1b", _of_sizes, _constant),
    CHUNKFLOW := Published("chunkflow", _of_sizes, _shrinking, saving=(1, 2, 4, 8, 16)),
    PACKING := Published("packing", packed, _constant),
    PACKING_BEST := Published("packing-best", packed_to_lengths, _constant, compared=False),
    MEGATRON := Published(
        *("1f1b", packed, _megatrons),
        compared=False,
        takes=is_interleaved,
        placements="one stage a rank, or interleaved N",
    ),
    ZB_V := Published(
        "zb-v", packed, _zb_v, splits=True, compared=False, takes=is_v, placements="v"
    ),
    ADAPTIS := Published("adaptis", packed, _warm_ups, splits=True, compared=False),
    SLIMPIPE := Published(
        *("slimpipe", _of_slices, _unsplit_warm_ups, (OFFLOAD, FULL)), compared=False
    ),
)
