"""Plans for a machine whose ranks have several stages (``Cost.place``).

A few chunkings, each list-scheduled on the ranks by a few warm-ups with as little recompute as fits
(:mod:`.pipeline`): what a search over one stage a rank turns more finely is chosen by the batch
here. `packing` packs whole documents to the context, whose orders are those of interleaved 1F1B and
its kin with the best warm-up; other planners cut as `epp` does.
"""

from collections.abc import Iterator

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.block import build_block, folded
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.fixed_size import packed_chunks
from megatron_epp.planner.chunks.params import UNCUT, ChunkingParams, build_chunks
from megatron_epp.planner.chunks.slicing import ideal_chunks
from megatron_epp.planner.feasibility import most_tokens
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.problem import loads_of, rates_of
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.planner.virtual.pipeline import Setup, best_of

# Numbers of chunks that are tried, as shares of the ideal one of as many ranks; a quarter of them
# with little effort. By hand.
CUT_FACTORS = (0.5, 0.85, 0.35, 1.2)
FEW = 2


def draft(name: str, batch: SortedBatch, cost: Cost, options: Options) -> ScoredDraft:
    """The fastest plan found for the stages and ranks of ``cost``; it may not fit."""
    splits = (True, False) if "wsplit" in options.levers and name != "packing" else (False,)
    offload = "offload" in options.levers
    best: ScoredDraft | None = None
    for chunking, said in _chunkings(name, batch, cost, options):
        loads = loads_of(chunking, batch.lengths, options.multiple)
        found = best_of(
            Setup(cost, cost.place, loads, chunking.sizes), splits=splits, offload=offload
        )
        schedule = found.found
        made = Draft(
            chunking,
            found.counts,
            schedule.kinds,
            schedule.chunks,
            note=f"{said}; {found.note}",
            stages=schedule.stages,
        )
        scored = ScoredDraft(schedule.seconds, schedule.over_bytes, made, cost)
        best = scored if best is None else min(best, scored, key=lambda each: each.rank)
    assert best is not None, "there is at least one chunking"
    return best


def _chunkings(
    name: str, batch: SortedBatch, cost: Cost, options: Options
) -> Iterator[tuple[Chunking, str]]:
    context = max(options.context, int(batch.lengths[0]))
    rates, width = rates_of(cost), options.lockstep
    packed = folded(packed_chunks(batch.lengths, context, rates), width, rates)
    yield packed, f"packed to {context}"
    if name == "packing":
        return
    total = float(rates.document_seconds(batch.lengths).sum())
    ideal = ideal_chunks(total / width, rates, cost.ranks)
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
    for rank in range(cost.ranks):
        own = [stage for stage in range(stages) if cost.rank_of[stage] == rank]
        rows.append(sorted((at + stage, stage, at) for stage in own for at in range(ops)))
    most = max(map(len, rows))
    found = np.full((2, len(rows), most), -1, np.int64)
    for rank, row in enumerate(rows):
        for number, (_, stage, at) in enumerate(row):
            found[:, rank, number] = stage, at
    return found[0], found[1]
