"""Schedule of packing to the best length for each batch (`packing-best`).

If a batch has few tokens, packing to the context results in only one or two micro-batches, and most
ranks are idle. Packing lengths from the longest document to the context are tried in simulation.
The best length is chosen for each batch in hindsight, so this is a strong baseline.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.published import packing
from megatron_epp.planner.recompute.uniform import ScoredDraft

# Factor between packing lengths; finer steps change little.
GROWTH = 2**0.25


def packing_lengths(longest: int, context: int) -> Iterator[int]:
    """Yield the packing lengths to try, in tokens, from ``longest`` to ``context``."""
    tokens = float(longest)
    while tokens < context:
        yield int(tokens)
        tokens *= GROWTH
    yield max(longest, context)


def draft(
    batch: SortedBatch,
    cost: Cost,
    options: Options,
    below: float = np.inf,
    planner: Callable[..., ScoredDraft | None] = packing.draft,
) -> ScoredDraft | None:
    """Return the best draft (plan as arrays) of ``planner`` over several packing lengths.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.
        planner: function that returns the draft for one packing length.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    best: ScoredDraft | None = None
    for tokens in packing_lengths(int(batch.lengths[0]), options.context):
        fits = best is not None and best.over_bytes <= 0
        limit = min(below, best.seconds) if best is not None and fits else below
        scored = planner(batch, cost, dataclasses.replace(options, context=tokens), limit)
        if scored is not None and (best is None or scored.rank < best.rank):
            best = scored
    return best
