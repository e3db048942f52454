"""The search of `epp`: chunkings by a few parameters, played by several policies, improved."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL
from megatron_epp.planner.chunks.block import build_block
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import TAPERS, UNCUT, ChunkingParams, build_chunks
from megatron_epp.planner.chunks.slicing import ideal_chunks
from megatron_epp.planner.epp.effort import Effort
from megatron_epp.planner.feasibility import most_tokens
from megatron_epp.planner.infinipipe.grouping import Programs, group
from megatron_epp.planner.infinipipe.memory import papers_ledger
from megatron_epp.planner.infinipipe.planner import chunkings as alg1_chunkings
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.emit import Draft, SortedBatch, merge_iw
from megatron_epp.planner.order.list_scheduler import Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policies, policy_of
from megatron_epp.planner.order.problem import (
    ScheduleProblem,
    every_layer,
    left_layers,
    loads_of,
    problem_of,
    rates_of,
)
from megatron_epp.planner.order.replay import replayed
from megatron_epp.planner.order.warmup import pipelines, shrinking, whole_groups
from megatron_epp.planner.recompute import ilp, offload
from megatron_epp.planner.recompute.choices import (
    Ladders,
    diagonal_counts,
    ladders,
    whole_layers,
)
from megatron_epp.planner.recompute.ilp import Solver
from megatron_epp.planner.recompute.local_search import trimmed

# Effort charged for building a chunking and its arrays, in simulated ops: fixed, and per array
# element; and for solving a recompute program. Chosen by hand: they need only be of the right size.
CHUNKING_OPS = 15_000
OPS_PER_NUMBER = 4
PROGRAM_OPS = 40_000

# The numbers from here to CLIMB_SHARE, and those of policies() and neighbours(), were chosen by
# hand when the search was written; which batches they were tried on is not recorded, and no sweep
# says how flat they are. The exact simulation judges whatever they propose.
# Numbers of chunks that are tried, as shares of the ideal one.
GRID = (0.25, 0.3, 0.35, 0.42, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.5)
WHOLE_GRID = (0.35, 0.6, 1.0)  # the same, with documents left whole
# Of the seeds where no stage waits for the last one's output layer.
RAMP = 20  # packs of a ramp
SEED_CUT = 1.4  # slices, as shares of a chunk, where short documents come first
SEED_LOCAL = (1.0, 2.0)  # times LOCAL
CLIMBERS = 2  # of the grid's best that are improved
GRID_SHARE = 0.35  # of the effort, for the grid
CLIMB_SHARE = 0.7  # of the effort, for grid and climbing
LIKELY = 0.85  # of the ideal number of chunks: where the grid begins
LOCAL = 1.0  # of a chunk's time, that one rank may take for a document at first
STRICT = PolicyParams(strict=True)
ALIKE = (1.0, 0.75, 0.5, 0.25)  # of the layers that uniform recompute needs


@dataclass(frozen=True, slots=True, eq=False)
class PreparedChunking:
    """A chunking with its recompute choices, ready to be played.

    law   [stages, chunks] forwards before each backward (planner.order.warmup)
    """

    chunking: Chunking
    loads: Loads
    counts: Counts
    work: ScheduleProblem
    law: np.ndarray
    pipelines: int


# With the effort that making each is worth.
PreparedChunkings = dict[ChunkingParams, tuple[PreparedChunking, float]]


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A prepared chunking played by one policy."""

    seconds: float
    over_bytes: float
    table: PreparedChunking
    policy: PolicyParams
    schedule: Schedule
    name: str

    @property
    def rank(self) -> tuple[float, float]:
        return self.over_bytes, self.seconds

    def draft(self) -> Draft:
        kinds, chunks = self.schedule.kinds, self.schedule.chunks
        if self.policy.split:
            kinds = merge_iw(kinds, chunks, self.table.work)
        return Draft(
            self.table.chunking,
            self.table.counts,
            kinds,
            chunks,
            self.table.pipelines,
            note=f"{self.name}; {self.policy}",
        )


class Search:
    """One batch on one machine, with the levers that are on.

    room_bytes   per stage beside residents, if less than all of it
    tables       those that another search made of the same batch, machine, levers but wsplit, and
                 room: taken at the price of making them, so that nothing else changes
    host         for what is offloaded, if less than all of it
    """

    def __init__(
        self,
        batch: SortedBatch,
        cost: Cost,
        options: Options,
        room_bytes: np.ndarray | None = None,
        tables: PreparedChunkings | None = None,
        host: offload.HostRoom | None = None,
    ):
        self.host = offload.HostRoom(cost.host_budget_bytes) if host is None else host
        self.batch, self.cost, self.options = batch, cost, options
        self.levers = options.levers
        self.rates = rates_of(cost)
        self.most = most_tokens(cost)
        self.effort = Effort(options.effort)
        self.solver = Solver()
        self.split = "wsplit" in options.levers
        self.room_bytes = room_bytes
        self.local = LOCAL if "local" in options.levers else 0.0
        self.known: dict[ChunkingParams, Candidate] = {}
        self.tables: PreparedChunkings = {} if tables is None else tables

    def work(self, chunking: Chunking, loads: Loads, counts: Counts) -> ScheduleProblem:
        self.effort.spend(CHUNKING_OPS + OPS_PER_NUMBER * self.cost.stages * chunking.count)
        work = problem_of(self.cost, chunking, loads, counts)
        if "exact" not in self.levers:
            work = papers_ledger(work, self.cost, loads, counts)
        if self.room_bytes is not None:
            work = dataclasses.replace(work, room_bytes=self.room_bytes)
        return work

    def table(self, chunking: Chunking, *, bare: bool = False) -> PreparedChunking:
        """``chunking`` with just enough recompute for its window law; where ``bare``, or where
        none is enough, for one document at a time; where that is too little too, all of it."""
        loads = loads_of(chunking, self.batch.lengths, self.options.multiple)
        work = self.work(chunking, loads, {})
        law, parts = self._law(chunking, loads, work)
        laws = [law] if not bare else []
        if "window" in self.levers:
            laws.append(whole_groups(chunking.sizes, self.cost.stages))
        counts: Counts | None = None
        for least in laws:
            counts = self._least_counts(chunking, loads, work, least)
            if counts is not None:
                break
        if counts is None:
            counts = every_layer(FULL, left_layers(self.cost, {}, chunking.count))
        if counts:
            self.effort.spend(PROGRAM_OPS)
            work = self.work(chunking, loads, counts)
        return PreparedChunking(chunking, loads, counts, work, law, parts)

    def _least_counts(
        self,
        chunking: Chunking,
        loads: Loads,
        kept: ScheduleProblem,
        least: np.ndarray,
    ) -> Counts | None:
        """Recompute counts of the diagonal program for the law ``least``; where keeping everything
        does not fit, of what is left when all layers are offloaded whose copies hide."""
        if _within(kept, least).all():
            return {}
        steps = self._ladder(loads)

        def recompute(
            work: ScheduleProblem, layers: list[np.ndarray] | None = None
        ) -> Counts | None:
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

        if "offload" in self.levers:
            aside = offload.layers_aside(self.cost, loads, self.host, least, kept.backward_order)
            left = left_layers(self.cost, aside, chunking.count)
            # Where even recomputing the rest leaves no room for what is on its way to or from the
            # host, the stage keeps off it; the last one does at times, for its logits.
            smallest = self.work(chunking, loads, {**aside, **every_layer(FULL, left)})
            there = _within(smallest, least)[:, None]
            aside = {choice: grid * there for choice, grid in aside.items()}
            if any(grid.any() for grid in aside.values()):
                left = left_layers(self.cost, aside, chunking.count)
                again = recompute(self.work(chunking, loads, aside), left)
                if again is not None:
                    return {**aside, **again}
        return recompute(kept)

    def _ladder(self, loads: Loads) -> Ladders:
        if "selective" in self.levers:
            return ladders(self.cost, loads)
        return whole_layers(self.cost)

    def _law(
        self, chunking: Chunking, loads: Loads, work: ScheduleProblem
    ) -> tuple[np.ndarray, int]:
        """Forwards before each backward, and the number of pipelines."""
        if "window" in self.levers:
            return shrinking(chunking.sizes, self.cost.stages), 1
        seconds = work.ops.seconds[F] + work.ops.seconds[B]
        delta = (self.cost.stages - 1) * float(seconds.mean())
        programs = Programs(self.solver, chunking, loads, self.cost, work.room_bytes)
        grouped = group(programs, delta)
        cuts = tuple(range(1, chunking.groups)) if grouped is None else grouped[0]
        return pipelines(chunking.sizes, list(cuts), self.cost.stages), len(cuts) + 1

    def recounted(self, table: PreparedChunking, counts: Counts) -> PreparedChunking | None:
        """``table`` with other recompute choices; None where the effort is spent."""
        if self.effort.spent:
            return None
        counts = {letter: grid for letter, grid in counts.items() if grid.any()}
        work = self.work(table.chunking, table.loads, counts)
        return dataclasses.replace(table, counts=counts, work=work)

    def recomputed(self, found: Candidate, counts: Counts) -> Candidate | None:
        """``found`` with other recompute choices, in its policy or in the very orders that it has,
        what is better; None where the effort is spent."""
        table = self.recounted(found.table, counts)
        if table is None:
            return None
        anew = self.play(table, found.policy, found.name)
        return min(anew, self.replay(table, found), key=lambda option: option.rank)

    def replay(self, table: PreparedChunking, found: Candidate) -> Candidate:
        """``table``, of the same chunks, in the orders of ``found``."""
        self._spend_play(table, found.policy)
        schedule = replayed(table.work, found.schedule)
        return dataclasses.replace(
            found,
            seconds=schedule.seconds,
            over_bytes=schedule.over_bytes,
            table=table,
            schedule=schedule,
        )

    def play(self, table: PreparedChunking, policy: PolicyParams, name: str) -> Candidate:
        self._spend_play(table, policy)
        sizes = table.chunking.sizes
        schedule = list_schedule(table.work, policy_of(policy, table.work, sizes, table.law))
        return Candidate(schedule.seconds, schedule.over_bytes, table, policy, schedule, name)

    def _spend_play(self, table: PreparedChunking, policy: PolicyParams) -> None:
        # H and G, where there are any, are no choice of the policy and are not counted.
        self.effort.spend(table.work.stages * table.work.chunks * (3 if policy.split else 2))

    def best_policy(self, table: PreparedChunking, name: str, *, many: bool = False) -> Candidate:
        tight, strict = bool(table.counts), "window" not in self.levers
        chosen = list(policies(self.split, many=many, strict=strict, tight=tight))
        if self.cost.vocabulary_parallel:  # 1F1B as it stands has no slack for the way of an H
            chosen = [*chosen[1:], chosen[0]]
        best: Candidate | None = None
        for policy in chosen:
            if best is not None and self.effort.spent:
                break
            played = self.play(table, policy, name)
            if best is None or played.rank < best.rank:
                best = played
        assert best is not None
        return best

    def try_params(self, params: ChunkingParams) -> Candidate:
        if params not in self.known:
            self.known[params] = self.best_policy(self.table_of(params), str(params))
        return self.known[params]

    def table_of(self, params: ChunkingParams) -> PreparedChunking:
        if params in self.tables:
            table, ops = self.tables[params]
            self.effort.spend(ops)
            return table
        before = self.effort.left
        given = params, self.batch.lengths, self.rates, self.most, self.options.multiple
        width = self.options.lockstep
        if width == 1:
            chunking: Chunking = build_chunks(*given, self.cost.cp)
        else:
            chunking = build_block(*given, width)
        table = self.table(chunking, bare=params.bare)
        self.tables[params] = table, before - self.effort.left
        return table

    def run(self) -> Candidate:
        """The best plan of our own; it may not fit."""
        found = self._grid() if "bins" in self.levers else self._alg1()
        best, start = self._best_of_many(found), None
        while offload.without_offload(best.table.counts) and best is not start:
            start = best
            if "trim" in self.levers:
                best = self._trimmed(best)
            alike = min(self._alike(best), key=lambda option: option.rank, default=best)
            if alike.rank < best.rank:
                best = self._best_of_many(alike)
        return best

    def _best_of_many(self, found: Candidate) -> Candidate:
        many = self.best_policy(found.table, found.name, many=True)
        return min(found, many, key=lambda option: option.rank)

    def _alike(self, best: Candidate) -> Iterator[Candidate]:
        """Uniform recompute on the best chunkings: one letter for so many layers of every stage
        and chunk, as far as they are not offloaded. As few as the window law needs, or the orders
        found; and fewer, where forwards wait for memory."""
        tokens = best.table.chunking.tokens
        others = (
            found
            for found in self.known.values()
            if not np.array_equal(found.table.chunking.tokens, tokens)
        )
        for found in (best, *sorted(others, key=lambda other: other.rank)[: CLIMBERS - 1]):
            steps = "".join(letters[1:] for letters in self._ladder(found.table.loads))
            for letter in dict.fromkeys(steps):
                named = dataclasses.replace(found, name=f"{found.name}, {letter} alike")
                law = self._least_alike(
                    named, letter, lambda table, of: self.play(table, STRICT, of.name)
                )
                own = self._least_alike(named, letter, lambda table, of: self.replay(table, of))
                if law is None or own is None:
                    return
                yield law
                yield own
                least = _most_layers(law.table.counts, letter)
                for layers in sorted({math.ceil(least * share) for share in ALIKE}):
                    played = self.recomputed(named, self._uniform(found, letter, layers))
                    if played is None:
                        return
                    yield played

    def _least_alike(
        self,
        found: Candidate,
        letter: str,
        play: Callable[[PreparedChunking, Candidate], Candidate],
    ) -> Candidate | None:
        """``found`` with ``letter`` for the fewest layers that fit when played so, all where none
        does; None where the effort is spent."""
        low, high = 1, max(self.cost.layers)
        best: Candidate | None = None
        while low <= high:
            middle = (low + high) // 2
            table = self.recounted(found.table, self._uniform(found, letter, middle))
            if table is None:
                return None
            played = play(table, found)
            if best is None or played.over_bytes <= 0 or best.over_bytes > 0:
                best = played
            if played.over_bytes > 0:
                low = middle + 1
            else:
                high = middle - 1
        return best

    def _uniform(self, found: Candidate, letter: str, layers: int) -> Counts:
        aside = offload.offload_of(found.table.counts)
        left = left_layers(self.cost, aside, found.table.chunking.count)
        # The first layers of a stage, whatever their kinds, as far as they are not offloaded.
        first = np.minimum(np.sum(left, axis=0), layers)
        by_kind = self.cost.kinds.from_front(np.zeros_like(first), first)
        return {
            **aside,
            **{(k, letter): np.minimum(by_kind[k], grid) for k, grid in enumerate(left)},
        }

    def _trimmed(self, found: Candidate) -> Candidate:
        slot = np.empty(found.table.chunking.count, dtype=np.int64)
        slot[found.table.chunking.backward] = np.arange(len(slot))
        behind = np.arange(self.cost.stages)[::-1]
        aside = offload.offload_of(found.table.counts)
        return trimmed(
            found,
            lambda at: offload.without_offload(at.table.counts),
            lambda counts: self.recomputed(found, {**aside, **counts}),
            lambda at: at.rank,
            slot[None] + behind[:, None],
        )

    def _alg1(self) -> Candidate:
        """Alg. 1's chunkings; all are played where K is chosen by simulation."""
        options = [
            (self.table(chunking), note)
            for chunking, note in alg1_chunkings(self.batch, self.cost, self.options, self.rates)
        ]
        if "chunks" not in self.levers:
            options = [min(options, key=lambda option: self._predicted(option[0]))]
        played = [self.best_policy(table, note) for table, note in options]
        return min(played, key=lambda found: found.rank)

    def _predicted(self, table: PreparedChunking) -> float:
        """Eq. 13 with the work itself: what the paper chooses K by."""
        work = table.work.ops.seconds[F] + table.work.ops.seconds[B]
        total = float(work.mean(axis=0).sum())
        return total * (1 + (self.cost.stages - 1) / table.work.chunks)

    def _grid(self) -> Candidate:
        total = float(self.rates.document_seconds(self.batch.lengths).sum())
        ideal = ideal_chunks(total / self.options.lockstep, self.rates, self.cost.stages)
        factors = GRID if "chunks" in self.levers else (1.0,)
        whole = self.effort.left
        # From the middle outwards, so that a small effort sees the likely ones.
        for factor in sorted(factors, key=lambda factor: abs(np.log(factor / LIKELY))):
            for params in self._seeds(max(1.0, ideal * factor)):
                self.try_params(params)
            if self.effort.left < whole * (1 - GRID_SHARE):
                break
        if self._best()[1].table.counts:
            # Memory is tight: K and V of cut documents may cost more than cutting saves.
            for factor in WHOLE_GRID:
                params = ChunkingParams(max(1.0, ideal * factor), cut=UNCUT, local=self.local)
                self.try_params(params)
        if "search" in self.levers:
            self._climb(whole)
        return self._best()[1]

    def _seeds(self, chunks: float) -> Iterator[ChunkingParams]:
        """With how the search begins for about so many chunks. Where no stage waits for the last
        one's output layer, filling the pipeline and draining it is what is left."""
        if not self.cost.vocabulary_parallel:
            yield ChunkingParams(chunks, local=self.local)
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

    def _climb(self, whole: float) -> None:
        """From the best of the grid's best, the best neighbour, and so on."""
        ranked = sorted(self.known, key=lambda params: self.known[params].rank)
        for params in ranked[:CLIMBERS]:
            at: ChunkingParams | None = params
            while at is not None and self.effort.left > whole * (1 - CLIMB_SHARE):
                at = self._best_neighbour(at, whole)

    def _best_neighbour(self, params: ChunkingParams, whole: float) -> ChunkingParams | None:
        best, best_rank = None, self.known[params].rank
        tight = bool(self.known[params].table.counts)
        fixed = "chunks" not in self.levers
        for neighbour in neighbours(params, tight=tight, fixed_count=fixed):
            if self.effort.left <= whole * (1 - CLIMB_SHARE):
                break
            found = self.try_params(neighbour)
            if found.rank < best_rank:
                best, best_rank = neighbour, found.rank
        return best


def _most_layers(counts: Counts, letter: str) -> int:
    """With that letter, of all kinds, in any stage and chunk."""
    grids = [grid for choice, grid in counts.items() if choice[1] == letter]
    return int(np.max(np.sum(grids, axis=0))) if grids else 0


def _within(work: ScheduleProblem, least: np.ndarray) -> np.ndarray:
    """[stages]: whether ``work`` fits under the window law ``least``."""
    return ilp.within(least, work.backward_order, *work.of_window)


def neighbours(
    params: ChunkingParams, *, tight: bool, fixed_count: bool
) -> Iterator[ChunkingParams]:
    """Parameters that differ in one number; ``tight``: something is recomputed.

    The factors are near (x 1.08) and far (x 1.2) steps; see GRID for where they come from.
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
    if not fixed_count:
        for factor in (1.08, 1 / 1.08, 1.2, 1 / 1.2):
            yield changed(chunks=max(1.0, params.chunks * factor))
        for extra in (1, -1, 2, -2):
            yield changed(extra_bins=params.extra_bins + extra)
    if params.cut < UNCUT:
        for cut in (0.8, 1.25, 1.5):
            yield changed(cut=params.cut * cut)
    yield changed(reverse=not params.reverse)
    if params.local:
        for factor in (0.7, 1.4):
            yield changed(local=params.local * factor)
