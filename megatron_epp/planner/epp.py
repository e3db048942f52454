"""Ours: chunks, order and recompute chosen by exact simulation, never slower than the others."""

import time
from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner import chunkflow, infinipipe, packing, seq1f1b
from megatron_epp.planner.finish import Batch, exact_peaks, finish
from megatron_epp.planner.memory import no_plan_fits, require_fit
from megatron_epp.planner.options import Options
from megatron_epp.planner.result import Planned
from megatron_epp.planner.search import Search
from megatron_epp.planner.uneven import balanced
from megatron_epp.planner.uniform import Played

# Baselines that try many plans, and skip those that cannot win.
HINDSIGHT = (seq1f1b, chunkflow, packing)
# Where the paper's ledger is used (lever `exact` off) and promises too much, the budget is
# tightened by what was missing, this often at most.
TIGHTENINGS = 3


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> Planned:
    """The fastest plan found within the budget; see the levers in :mod:`.options`.

    A PlanError where a document, or the batch as a whole, fits no plan.
    """
    began = time.perf_counter()
    batch = Batch.of(lengths)
    require_fit(cost, batch.documents)
    best, machine = _own(batch, cost, options), cost
    if options.open_layers and "uneven" in options.levers:
        # As many chunks as the plan with even layers turned out to have.
        chunks = best.draft.chunking.count if best else 8 * cost.stages
        moved = balanced(cost, batch.lengths, chunks)
        if moved.layers != cost.layers:
            other = _own(batch, moved, options)
            if other is not None and (best is None or other.rank < best.rank):
                best, machine = other, moved
    candidates = [(best, machine)] if best is not None else []
    faithful = infinipipe.draft(batch, cost, options)
    candidates.append((faithful, cost))
    for module in HINDSIGHT:
        fitting = [made.seconds for made, _ in candidates if made.over_bytes <= 0]
        other = module.draft(batch, cost, options, min(fitting, default=np.inf))
        if other is not None:
            candidates.append((other, cost))
    played, machine = min(candidates, key=lambda candidate: candidate[0].rank)
    planned = finish("epp", batch, played.draft, machine, options, began)
    if not planned.fits:
        raise no_plan_fits(machine, batch.documents, planned.peak_bytes)
    return planned


def _own(batch: Batch, cost: Cost, options: Options) -> Played | None:
    """What our own search finds, None where nothing of it fits."""
    room = np.array(cost.budget_bytes) - np.array(cost.states_bytes)
    for _ in range(TIGHTENINGS):
        found = Search(batch, cost, options, room).run()
        draft = found.draft()
        if "exact" in options.levers:
            return Played(found.seconds, found.over_bytes, draft)
        exact = exact_peaks(batch, draft, cost, options)
        over = exact - np.array(cost.budget_bytes)
        if (over <= 0).all():
            return Played(found.seconds, 0.0, draft)
        room = room - np.maximum(over, 0.0) * 1.02
    return None
