"""InfiniPipe as published: Alg. 1, search over K, grouping into pipelines, diagonal program.

True to the paper where it is clear; where it is not, the choice is said here. T_m of Alg. 1 has
two readings (the tokens of the first slice, or those that short documents do in a slice's time):
both are tried, and the one with the better *predicted* time is taken, as for K. Eq. 13 predicts;
nothing is simulated before the choice is made. In the search the program is relaxed and rounded
up; the chosen pipelines are solved as integer programs with the paper's gap of 2%.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, Kind
from megatron_epp.planner import diagonal
from megatron_epp.planner.buckets import alg1
from megatron_epp.planner.chunking import Chunking, assemble
from megatron_epp.planner.diagonal import Solver
from megatron_epp.planner.finish import Batch, Draft, finish
from megatron_epp.planner.listing import Listed, list_schedule
from megatron_epp.planner.memory import most_tokens, require_fit
from megatron_epp.planner.options import Options
from megatron_epp.planner.paper_memory import paper_freed, paper_moves
from megatron_epp.planner.result import Planned
from megatron_epp.planner.slicing import Rates, cut_at, equal_points
from megatron_epp.planner.uniform import Played, strict
from megatron_epp.planner.windows import pipelines
from megatron_epp.planner.work import Work, loads_of, rates_of, work_of

SLICE_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # K
LEAST_SLICE_TOKENS = 1024
# The paper's ledger is not the exact one. Where a plan's exact peak exceeds the budget, its stages
# are solved again with that much less, this often at most.
TIGHTENINGS = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One chunking with its best grouping.

    cuts      group numbers at which another pipeline begins
    seconds   predicted, by eq. 13 with the work itself added: K changes it through the constants
    """

    chunking: Chunking
    loads: Loads
    cuts: tuple[int, ...]
    seconds: float
    note: str


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> Planned:
    """The paper's plan for one replica."""
    began = time.perf_counter()
    batch = Batch.of(lengths)
    require_fit(cost, batch.documents)
    return finish("infinipipe", batch, draft(batch, cost, options).draft, cost, options, began)


def draft(batch: Batch, cost: Cost, options: Options) -> Played:
    """As :func:`plan`, before it is checked and played."""
    budget = _room(cost)
    solver = Solver()
    chosen = None
    for _ in range(TIGHTENINGS):
        found = best_candidate(solver, batch, cost, options, budget)
        if found is None:
            break
        chosen = found
        played = _played(solver, chosen, cost, budget)
        if played is None:
            break
        drafted, peak_bytes = played
        if drafted.over_bytes <= 0:
            return drafted
        budget = budget - np.maximum(peak_bytes - _room(cost), 0.0) * 1.01
    # Nothing fits by the paper's rules: everything recomputed, as it is.
    return _everything_recomputed(batch, cost, options, chosen)


def _room(cost: Cost) -> np.ndarray:
    return np.array(cost.budget_bytes) - np.array(cost.states_bytes)


def chunkings(
    batch: Batch, cost: Cost, options: Options, rates: Rates
) -> Iterator[tuple[Chunking, str]]:
    """What Alg. 1 makes for every K and both readings of T_m."""
    longest = int(batch.lengths[0])
    capacity = most_tokens(cost)
    for slices in SLICE_COUNTS:
        if slices > 1 and longest / slices < LEAST_SLICE_TOKENS:
            break
        points = equal_points(longest, slices, rates, options.multiple)
        if len(points) != slices + 1 or points[1] > capacity:
            continue
        target = float(rates.document_seconds(batch.lengths[:1])[0]) / slices
        cuts = cut_at(batch.lengths, points)
        first = int(points[1])
        equal = _equal_tokens(cuts.shorts.tokens, rates, target)
        for name, limit in (("first slice", first), ("equal time", max(first, equal))):
            if name == "equal time" and limit == first:
                continue
            bucket, buckets = alg1(cuts, rates, target, min(limit, capacity))
            chunking = assemble(cuts, bucket, buckets, rates)
            yield chunking, f"K {slices}, T_m {min(limit, capacity)} ({name})"


def _equal_tokens(shorts: np.ndarray, rates: Rates, target: float) -> int:
    """Tokens of short documents that take ``target`` seconds."""
    if not len(shorts):
        return 0
    return int(target * shorts.sum() / rates.document_seconds(shorts).sum())


def best_candidate(
    solver: Solver, batch: Batch, cost: Cost, options: Options, budget: np.ndarray
) -> Candidate | None:
    """The chunking and grouping with the least predicted time, None where none fits."""
    rates = rates_of(cost)
    best = None
    for chunking, note in chunkings(batch, cost, options, rates):
        loads = loads_of(chunking, batch.lengths, options.multiple)
        work = float(rates.seconds(loads.tokens, loads.pairs).sum())
        work += chunking.count * rates.chunk_seconds
        delta = (cost.stages - 1) * work / chunking.count
        if best is not None and work + delta >= best.seconds:
            continue  # recompute and more pipelines only add
        below = np.inf if best is None else best.seconds - work
        grouped = group(solver, chunking, loads, cost, budget, delta, below)
        if grouped is None:
            continue
        cuts, overhead = grouped
        if best is None or work + overhead < best.seconds:
            best = Candidate(chunking, loads, cuts, work + overhead, note)
    return best


def group(
    solver: Solver,
    chunking: Chunking,
    loads: Loads,
    cost: Cost,
    budget: np.ndarray,
    delta: float,
    below: float = np.inf,
) -> tuple[tuple[int, ...], float] | None:
    """Eq. 14: which split counts share a pipeline; the cuts between groups, and the seconds of
    all deltas and recompute. None where no grouping fits, or none takes less than ``below``.

    Groups stand in falling order of their split counts, so a pipeline is a run of them.
    """
    sizes = chunking.sizes
    borders = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    last = len(borders) - 1
    layer_seconds = _layer_seconds(cost, loads)
    ledger = Ledger.of(cost, loads)

    def recompute(first: int, stop: int) -> float:
        """T_ckpt of groups borders[first] to borders[stop]; infinite if it cannot fit."""
        begin, end = borders[first], borders[stop]
        layers = recompute_layers(solver, chunking, ledger, cost, budget, begin, end, integer=False)
        return np.inf if layers is None else layer_seconds * float(layers.sum())

    whole = recompute(0, last)
    if whole <= delta:
        return (), delta + whole  # two pipelines cost two deltas at least
    least = [0.0] + [np.inf] * last
    came = [0] * (last + 1)
    for stop in range(1, last + 1):
        # A longer run needs no less recompute, so the first that cannot win ends the row.
        for first in range(stop - 1, -1, -1):
            if least[first] + delta >= min(least[stop], below):
                continue
            taken = whole if stop - first == last else recompute(first, stop)
            if delta + taken >= min(least[stop], below):
                break
            if least[first] + delta + taken < least[stop]:
                least[stop], came[stop] = least[first] + delta + taken, first
    if least[-1] == np.inf:
        return None
    cuts, at = [], last
    while at:
        at = came[at]
        if at:
            cuts.append(borders[at])
    return tuple(reversed(cuts)), least[-1]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The paper's bytes of a chunking: as planner.paper_memory."""

    moves: np.ndarray
    freed: np.ndarray

    @classmethod
    def of(cls, cost: Cost, loads: Loads) -> "Ledger":
        return cls(paper_moves(cost, loads), paper_freed(cost, loads))


def recompute_layers(
    solver: Solver,
    chunking: Chunking,
    ledger: Ledger,
    cost: Cost,
    budget: np.ndarray,
    first: int,
    stop: int,
    *,
    integer: bool,
) -> np.ndarray | None:
    """C of eqs 18 to 20 for the pipeline of groups first to stop."""
    begin, end = chunking.starts[first], chunking.starts[stop]
    sizes = chunking.sizes[first:stop]
    rows = diagonal.rows_of(
        pipelines(sizes, [], cost.stages),
        chunking.backward[begin:end] - begin,
        np.ascontiguousarray(ledger.moves[..., begin:end]),
        np.ascontiguousarray(ledger.freed[None, :, begin:end]),
        budget,
    )
    most = np.full(rows.slots, min(cost.layers), dtype=np.int64)
    return diagonal.solve(solver, rows, most, integer=integer)


def _layer_seconds(cost: Cost, loads: Loads) -> float:
    """F_hat: the forward of one layer, of the average chunk."""
    return float(cost.seconds(Kind.FORWARD, loads).sum() / sum(cost.layers) / loads.chunks)


def _played(
    solver: Solver, candidate: Candidate, cost: Cost, budget: np.ndarray
) -> tuple[Played, np.ndarray] | None:
    """The plan of ``candidate`` with integer recompute, and its exact peaks by stage."""
    chunking, loads = candidate.chunking, candidate.loads
    ledger = Ledger.of(cost, loads)
    edges = [0, *candidate.cuts, chunking.groups]
    grid = np.zeros((cost.stages, chunking.count))
    for first, stop in itertools.pairwise(edges):
        layers = recompute_layers(solver, chunking, ledger, cost, budget, first, stop, integer=True)
        if layers is None:
            return None
        begin, end = chunking.starts[first], chunking.starts[stop]
        backward = chunking.backward[begin:end] - begin
        grid[:, begin:end] = diagonal.spread(layers, backward, cost.stages)
    counts = {FULL: grid} if grid.any() else {}
    listed = _listed(chunking, candidate.cuts, work_of(cost, chunking, loads, counts))
    made = Draft(
        chunking,
        counts,
        listed.kinds,
        listed.chunks,
        pipelines=len(edges) - 1,
        note=f"{candidate.note}, predicted {candidate.seconds:.6g} s",
    )
    return Played(listed.seconds, listed.over_bytes, made), listed.peak_bytes


def _listed(chunking: Chunking, cuts: Sequence[int], work: Work) -> Listed:
    return list_schedule(work, strict(pipelines(chunking.sizes, list(cuts), work.stages)))


def _everything_recomputed(
    batch: Batch, cost: Cost, options: Options, chosen: Candidate | None
) -> Played:
    if chosen is None:
        *_, (chunking, note) = chunkings(batch, cost, options, rates_of(cost))
        cuts: Sequence[int] = range(1, chunking.groups)
    else:
        chunking, cuts, note = chosen.chunking, chosen.cuts, chosen.note
    loads = loads_of(chunking, batch.lengths, options.multiple)
    counts = {FULL: np.tile(np.array(cost.layers, float)[:, None], (1, chunking.count))}
    listed = _listed(chunking, cuts, work_of(cost, chunking, loads, counts))
    made = Draft(
        chunking,
        counts,
        listed.kinds,
        listed.chunks,
        pipelines=len(cuts) + 1,
        note=f"{note}, everything recomputed",
    )
    return Played(listed.seconds, listed.over_bytes, made)
