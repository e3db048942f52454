"""Ours: chunks, order and recompute chosen by exact simulation, never slower than the others."""

import time
from collections.abc import Sequence

from megatron_epp.cost.cost import Cost
from megatron_epp.planner import chunkflow, infinipipe, packing, seq1f1b
from megatron_epp.planner.finish import Batch, finish
from megatron_epp.planner.memory import require_fit
from megatron_epp.planner.options import Options
from megatron_epp.planner.result import Planned
from megatron_epp.planner.search import Search

PORTFOLIO = (infinipipe, seq1f1b, chunkflow, packing)


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> Planned:
    """The fastest plan found within the budget; see the levers in :mod:`.options`."""
    began = time.perf_counter()
    batch = Batch.of(lengths)
    require_fit(cost, batch.documents)
    candidates = []
    found = Search(batch, cost, options).run()
    if found is not None:
        candidates.append((found.rank, found.draft()))
    for module in PORTFOLIO:
        played = module.draft(batch, cost, options)
        candidates.append((played.rank, played.draft))
    _, draft = min(candidates, key=lambda candidate: candidate[0])
    return finish("epp", batch, draft, cost, options, began)
