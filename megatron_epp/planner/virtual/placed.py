"""Plans for a machine whose ranks have several stages (``Cost.place``).

A few chunkings, each list-scheduled on the ranks by a few warm-ups with as little recompute as fits
(:mod:`.pipeline`): what a search over one stage a rank turns more finely is chosen by the batch
here. `packing` packs whole documents to the context; other planners cut as `epp` does. Methods that
others have published (:mod:`.methods`) are planned here with one stage a rank, too.
"""

from collections.abc import Iterator

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.block import build_block
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import UNCUT, ChunkingParams, build_chunks
from megatron_epp.planner.chunks.slicing import ideal_chunks
from megatron_epp.planner.feasibility import most_tokens
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.problem import loads_of, rates_of
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.planner.virtual.methods import METHODS, PublishedMethod, packed
from megatron_epp.planner.virtual.pipeline import Setup, best_of, warm_ups

# Numbers of chunks that are tried, as shares of the ideal one of as many ranks; a quarter of them
# with little effort. By hand.
CUT_FACTORS = (0.5, 0.85, 0.35, 1.2)
FEW = 2


def draft(name: str, batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    """The fastest plan found for the stages and ranks of ``cost``; it may not fit. ValueError: the
    method ``name`` has other stages."""
    method = METHODS.get(name)
    if method is None:
        split = "wsplit" in options.levers and name != "packing"
        policies = warm_ups((True, False) if split else (False,))
        method = PublishedMethod(packed if name == "packing" else _elastic, policies)
    place = cost.layout.placement.place
    if not method.stands(place):
        raise ValueError(
            f"planner {name!r} does not plan stages on ranks {' '.join(map(str, place))}; expected "
            f"the placement {method.expected}"
        )
    best: ScoredDraft | None = None
    for chunking, said in method.chunkings(batch, cost, options):
        loads = loads_of(chunking, batch.lengths, options.multiple)
        setup = Setup(cost, place, loads, chunking.sizes)
        found = best_of(setup, method.policies, offload="offload" in options.levers)
        schedule = found.found
        made = Draft(
            chunking,
            found.counts,
            schedule.kinds,
            schedule.chunks,
            note=f"{said}; {found.note}",
            stages=schedule.stages if cost.layout.place else None,
        )
        scored = ScoredDraft(schedule.seconds, schedule.over_bytes, made, cost)
        best = scored if best is None else min(best, scored, key=lambda each: each.rank)
    assert best is not None, "there is at least one chunking"
    return best


def _elastic(batch: SortedBatch, cost: Cost, options: Options) -> Iterator[tuple[Chunking, str]]:
    rates, width = rates_of(cost), options.lockstep
    yield from packed(batch, cost, options)
    total = float(rates.document_seconds(batch.lengths).sum())
    ideal = ideal_chunks(total / width, rates, cost.layout.placement.ranks)
    most = max(most_tokens(cost), int(batch.lengths[0]) if options.whole else 1)
    for share in CUT_FACTORS if options.effort > 1 else CUT_FACTORS[:FEW]:
        params = ChunkingParams(max(1.0, ideal * share), cut=UNCUT if options.whole else 1.0)
        given = params, batch.lengths, rates, most, options.multiple
        yield build_chunks(*given) if width == 1 else build_block(*given, width), str(params)


def evaluation_stages(kinds: np.ndarray, cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """For ``kinds`` [stages, ops], the same on every stage: the stage and the op's place there of
    each op of a rank, [ranks, ops]; a stage behind another runs each a step later."""
    stages, ops = kinds.shape
    rows = []
    for rank in range(cost.layout.placement.ranks):
        own = [stage for stage in range(stages) if cost.layout.placement.place[stage] == rank]
        rows.append(sorted((at + stage, stage, at) for stage in own for at in range(ops)))
    most = max(map(len, rows))
    found = np.full((2, len(rows), most), -1, np.int64)
    for rank, row in enumerate(rows):
        for number, (_, stage, at) in enumerate(row):
            found[:, rank, number] = stage, at
    return found[0], found[1]
