"""Search of the ``epp`` planner: chunkings by a few parameters, scheduled by several policies."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Choice, Counts
from megatron_epp.planner.chunks.block import build_block
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import TAPERS, UNCUT, ChunkingParams, build_chunks
from megatron_epp.planner.chunks.slicing import ideal_chunks, remembered
from megatron_epp.planner.chunks.tree_block import build_tree_block
from megatron_epp.planner.epp.player import Candidate, Player
from megatron_epp.planner.epp.preparation import PreparedChunking, PreparedChunkings
from megatron_epp.planner.epp.uniform_search import uniform_recompute
from megatron_epp.planner.feasibility import most_tokens
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.policies import late_splits
from megatron_epp.planner.order.problem import ChunkProblems, rates_of
from megatron_epp.planner.recompute import offload

# Chosen by hand, like epp.search.GRID.
SCALES = (0.0, 0.25, 0.5, 0.75, 0.9)
UNDO_STEPS = (4, 2, 1)  # numbers of layers per diagonal to stop recomputing at once

# The numbers down to CLIMB_FRACTION, and those of policies() and neighbours(), were chosen by hand.
# The batches used for that are not recorded, and no sweep shows how sensitive plans are to them.
# The exact simulation decides between all proposals.
# Numbers of chunks tried, as fractions of the ideal number.
GRID = (0.25, 0.3, 0.35, 0.42, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5)
FULL_GRID_EFFORT = (0.35, 0.6, 1.0)  # the same for unsliced documents
# For seeds with vocabulary parallelism, where no stage waits for the last stage's LM head:
RAMP = 20  # number of packs of a ramp
RAMP_MEAN = 0.3  # mean size of a ramp's pack, as a fraction of a full pack
SEED_CUT = 1.4  # time of a slice as a fraction of a chunk's time, if short documents come first
SEED_LOCAL = (1.0, 2.0)  # factors on LOCAL
CLIMBERS = 2  # number of best grid points that are improved
TIE = 0.005  # plans count as equal within this fraction of the time; no cost model is more exact
GRID_FRACTION = 0.35  # of the effort, for the grid
CLIMB_FRACTION = 0.7  # of the effort, for grid and climbing
LIKELY = 0.85  # factor on the ideal number of chunks at which the grid begins
LOCAL = 1.0  # initial ``ChunkingParams.local``


class Search(Player):
    """Search for the best plan of one batch; arguments as in :class:`Preparation`.

    ``shared`` contains chunkings of an earlier search with the same arguments, except that the
    lever `wsplit` may differ. The search spends their effort again, so sharing changes no result.
    """

    def __init__(
        self,
        batch: SortedBatch,
        cost: Cost,
        options: Options,
        halves: bool = True,
        shared: PreparedChunkings | None = None,
        host: offload.HostHeadroom | None = None,
    ):
        super().__init__(batch, cost, options, halves, host)
        self.rates = rates_of(cost)
        self.total = batch.work_seconds(self.rates) / options.lockstep
        self.most = most_tokens(cost)
        self.local = LOCAL if "local" in options.levers else 0.0
        self.known: dict[ChunkingParams, Candidate] = {}
        self.shared: PreparedChunkings = {} if shared is None else shared
        self.built: dict[ChunkingParams, tuple[Chunking, ChunkProblems]] = {}
        self.alike: dict[Hashable, tuple[PreparedChunking, float]] = {}  # by contents of the chunks
        self.cutter = remembered()

    def try_params(self, params: ChunkingParams) -> Candidate:
        """Return the best candidate whose chunks have the parameters ``params``."""
        if params not in self.known:
            hopeless: list[Candidate] = []

            def is_hopeless(kept: PreparedChunking) -> bool:
                hopeless.append(self.unbounded(kept, str(params)))
                return hopeless[0].seconds > self._of_interest()

            prepared = self.prepared_of(params, is_hopeless)
            if prepared is None:
                self._spend_policies(hopeless[0].prepared)
                self.known[params] = hopeless[0]
            else:
                self.known[params] = self.best_policy(prepared, str(params))
        return self.known[params]

    def _of_interest(self) -> float:
        """Return the seconds above which no later step of the search can use a chunking."""
        fitting = [each for each in self.known.values() if each.over_bytes <= 0]
        fitting.sort(key=lambda each: each.seconds)
        if not fitting:
            return math.inf
        others = _of_other_chunks(fitting, fitting[0])
        second = next((each.seconds for each in others), math.inf)
        return max(second, fitting[0].seconds * (1 + TIE))

    def prepared_of(
        self, params: ChunkingParams, hopeless: Callable[[PreparedChunking], bool]
    ) -> PreparedChunking | None:
        """Return the chunking of ``params`` with its recompute; None if ``hopeless`` rejects it."""
        if params not in self.shared and params not in self.built:
            self.build([params])
        if params not in self.shared:
            chunking, problems = self.built.pop(params)
            alike = (params.bare, *chunking.contents)
            if alike not in self.alike:
                before = self.effort.left
                fresh = self.prepare(
                    chunking, bare=params.bare, hopeless=hopeless, problems=problems
                )
                if fresh is None:
                    return None
                self.alike[alike] = self.shared[params] = fresh, before - self.effort.left
                return fresh
            self.shared[params] = self.alike[alike]
        prepared, ops = self.shared[params]
        self.effort.spend(ops)
        return prepared

    def build(self, several: Iterable[ChunkingParams]) -> None:
        """Build the chunks of ``several`` parameters together, which saves time.

        The effort is charged later, when :meth:`try_params` tries the parameters.
        """
        lengths, layout = self.batch.lengths, self.cost.layout
        chunkings: dict[ChunkingParams, Chunking] = {}
        for params in several:
            if params in self.known or params in self.shared or params in self.built:
                continue
            arguments = params, lengths, self.rates, self.most, self.cost.multiple
            if self.batch.trees:
                chunkings[params] = build_tree_block(
                    params, self.batch.trees, self.most, self.cost.multiple
                )
            elif self.options.lockstep == 1:
                chunkings[params] = build_chunks(*arguments, layout.cp, self.cutter)
            else:
                chunkings[params] = build_block(*arguments, self.options.lockstep)
        if chunkings:
            problems = self.problems(list(chunkings.values()))
            self.built |= {
                params: (chunkings[params], problem)
                for params, problem in zip(chunkings, problems, strict=True)
            }

    def run(self) -> Candidate:
        """Run the search and return the best candidate, which may exceed the memory budget."""
        candidate = self._grid()
        best, start = self._best_of_many(candidate), None
        while offload.without_offload(best.prepared.counts) and best is not start:
            start = best
            best = self._trimmed(best)
            options = uniform_recompute(self, best, self._others(best))
            alike = min(options, key=lambda option: option.rank, default=best)
            if alike.rank < best.rank:
                best = self._best_of_many(alike)
        return best

    def _best_of_many(self, candidate: Candidate) -> Candidate:
        many = self.best_policy(candidate.prepared, candidate.name, many=True)
        return min(candidate, many, key=lambda option: option.rank)

    def split_late(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the best of ``candidates``, and of variants that split their last backwards."""
        tried = list(candidates)
        for each in candidates:
            for policy in late_splits(each.policy):
                tried.append(self.play(each.prepared, policy, each.name))
        return min(tried, key=lambda each: each.rank)

    def _others(self, best: Candidate) -> list[Candidate]:
        """Return the best candidates whose chunks differ from the chunks of ``best``."""
        others = _of_other_chunks(self.known.values(), best)
        return sorted(others, key=lambda other: other.rank)[: CLIMBERS - 1]

    def _trimmed(self, candidate: Candidate) -> Candidate:
        slot = np.empty(candidate.prepared.chunking.count, dtype=np.int64)
        slot[candidate.prepared.chunking.backward] = np.arange(len(slot))
        after = np.arange(self.cost.layout.stages)[::-1]
        offloaded = offload.offload_of(candidate.prepared.counts)
        return trimmed(
            candidate,
            lambda at: offload.without_offload(at.prepared.counts),
            lambda counts: self.recomputed(candidate, {**offloaded, **counts}),
            lambda at: at.rank,
            slot[None] + after[:, None],
        )

    def _grid(self) -> Candidate:
        ideal = ideal_chunks(self.total, self.rates, self.cost.layout.placement.ranks)
        effort_left = self.effort.left
        # From the middle outwards, so that a small effort tries the likely numbers.
        outwards = sorted(GRID, key=lambda factor: abs(np.log(factor / LIKELY)))
        seeds = [list(self._seeds(max(1.0, ideal * factor))) for factor in outwards]
        for number, some in enumerate(seeds):
            # Build the chunks of the first number alone, because a small effort ends there. Then
            # build those of more and more numbers together.
            if number & (number - 1) == 0:
                self.build(itertools.chain(*seeds[number : max(1, 2 * number)]))
            for params in some:
                self.try_params(params)
            if self.effort.left < effort_left * (1 - GRID_FRACTION):
                break
        if self._best()[1].prepared.counts:
            # Memory is tight: K/V of sliced documents may cost more than slicing saves.
            for factor in FULL_GRID_EFFORT:
                params = ChunkingParams(max(1.0, ideal * factor), cut=UNCUT, local=self.local)
                self.try_params(params)
        self._climb(effort_left)
        return self._best()[1]

    def _seeds(self, chunks: float) -> Iterator[ChunkingParams]:
        """Yield the initial parameters of the search for about ``chunks`` chunks.

        With vocabulary parallelism, small first packs shorten the warm-up if hosts are fast enough.
        """
        ramped = self.total * RAMP_MEAN / chunks > self.rates.host_seconds
        if not (self.cost.layout.vocabulary_parallel and ramped):
            yield ChunkingParams(chunks, local=self.local)
            if self.batch.trees:
                yield ChunkingParams(chunks, front=2, back=1)
            return
        for start in (
            ChunkingParams(chunks, ramp=RAMP),
            ChunkingParams(chunks, front=len(TAPERS) - 1),
        ):
            for times in SEED_LOCAL if self.local else (0.0,):
                first = dataclasses.replace(start, local=times * self.local)
                yield first
                yield dataclasses.replace(first, cut=SEED_CUT, reverse=True)

    def _best(self) -> tuple[ChunkingParams, Candidate]:
        return min(self.known.items(), key=lambda entry: entry[1].rank)

    def _climb(self, effort_left: float) -> None:
        """Move each of the CLIMBERS best parameters to its best neighbour, while that helps."""
        ranked = sorted(self.known, key=lambda params: self.known[params].rank)
        for params in ranked[:CLIMBERS]:
            at: ChunkingParams | None = params
            while at is not None and self.effort.left > effort_left * (1 - CLIMB_FRACTION):
                at = self._best_neighbour(at, effort_left)

    def _best_neighbour(self, params: ChunkingParams, effort_left: float) -> ChunkingParams | None:
        best, best_rank = None, self.known[params].rank
        tight = bool(self.known[params].prepared.counts)
        around = list(neighbours(params, tight=tight, packs=not self.batch.trees))
        self.build(around)
        for neighbour in around:
            if self.effort.left <= effort_left * (1 - CLIMB_FRACTION):
                break
            candidate = self.try_params(neighbour)
            if candidate.rank < best_rank:
                best, best_rank = neighbour, candidate.rank
        return best


def _of_other_chunks(candidates: Iterable[Candidate], than: Candidate) -> Iterator[Candidate]:
    """Yield the candidates whose numbers of tokens per chunk differ from those of ``than``."""
    tokens = than.prepared.chunking.tokens
    return (
        each for each in candidates if not np.array_equal(each.prepared.chunking.tokens, tokens)
    )


def neighbours(
    params: ChunkingParams, *, tight: bool, packs: bool = True
) -> Iterator[ChunkingParams]:
    """Yield parameters that differ from ``params`` in one field.

    The number of chunks changes in small (x 1.08) and large (x 1.2) steps. These factors were
    chosen by hand, like those of GRID.

    Args:
        params: the parameters to start from.
        tight: whether the plan of ``params`` recomputes any layer.
        packs: whether to vary the number of packs; False for documents with shared prefixes.
    """

    def changed(**fields: Any) -> ChunkingParams:
        return dataclasses.replace(params, **fields)

    def near(index: int) -> Iterable[int]:
        return (at for at in (index + 1, index + 2, index - 1) if 0 <= at < len(TAPERS))

    if tight:
        yield changed(bare=not params.bare)
    if params.ramp:
        for factor in (1.4, 0.7):
            yield changed(ramp=round(params.ramp * factor))
    else:
        for at in near(params.front):
            yield changed(front=at)
    for at in near(params.back):
        yield changed(back=at)
    for factor in (1.08, 1 / 1.08, 1.2, 1 / 1.2):
        yield changed(chunks=max(1.0, params.chunks * factor))
    for extra in (1, -1, 2, -2) if packs else ():
        yield changed(extra_bins=params.extra_bins + extra)
    if params.cut < UNCUT:
        for cut in (0.8, 1.25, 1.5):
            yield changed(cut=params.cut * cut)
    yield changed(reverse=not params.reverse)
    if params.local:
        for factor in (0.7, 1.4):
            yield changed(local=params.local * factor)


# ------------------------------------------------------------------ hill climbing over recompute


def trimmed[T](
    best: T,
    counts_of: Callable[[T], Counts],
    play: Callable[[Counts], T | None],
    rank: Callable[[T], tuple[float, float]],
    slots: np.ndarray,
) -> T:
    """Return the best candidate found by reducing the recompute of ``best``.

    First, all recompute counts are scaled. Then the counts of each diagonal are reduced, one
    diagonal after the other, starting with those with the most layers. A diagonal consists of
    backwards that run at the same time on different stages.

    Args:
        best: candidate to start from.
        counts_of: function that returns the recompute counts of a candidate.
        play: function that simulates given counts and returns a candidate; None if no effort is
            left.
        rank: function that returns the sort key of a candidate.
        slots: [stages, chunks] index of the diagonal of each stage and chunk.
    """
    start = counts_of(best)
    for scale in SCALES:
        tried = play({mode: np.ceil(grid * scale) for mode, grid in start.items()})
        if tried is None:
            return best
        if rank(tried) < rank(best):
            best = tried
    for step in UNDO_STEPS:
        for mode, slot in list(_places(counts_of(best), slots)):
            counts = counts_of(best)
            grid = counts[mode]
            less = np.where(slots == slot, np.maximum(grid - step, 0.0), grid)
            tried = play({**counts, mode: less})
            if tried is None:
                return best
            if rank(tried) < rank(best):
                best = tried
    return best


def _places(counts: Counts, slots: np.ndarray) -> Iterator[tuple[Choice, int]]:
    for mode, grid in counts.items():
        weight = np.bincount(slots.ravel(), weights=grid.ravel())
        order = np.argsort(-weight, kind="stable")
        yield from ((mode, int(slot)) for slot in order if weight[slot] > 0)
