"""Seq1F1B as InfiniPipe's paper defines its baseline: fixed-size chunks, static recompute.

The original cuts every sequence into the same number of slices, which does not suit lengths that
vary; the baseline splits and packs to a fixed size instead. Which size is best is found by
simulation, batch by batch: in hindsight, so the baseline is a strong one.
"""

import time
from collections.abc import Sequence

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.finish import Batch, finish
from megatron_epp.planner.fixed_size import fixed_chunks, sizes
from megatron_epp.planner.memory import require_fit
from megatron_epp.planner.options import Options
from megatron_epp.planner.result import Planned
from megatron_epp.planner.uniform import Played, fastest, uniform_draft
from megatron_epp.planner.windows import constant
from megatron_epp.planner.work import rates_of


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> Planned:
    """The fastest of several chunk sizes, each with the fewest recomputed layers that fit."""
    began = time.perf_counter()
    batch = Batch.of(lengths)
    require_fit(cost, batch.documents)
    return finish("seq1f1b", batch, draft(batch, cost, options).draft, cost, options, began)


def draft(batch: Batch, cost: Cost, options: Options) -> Played:
    """As :func:`plan`, before it is checked and played."""
    context = max(options.context, int(batch.lengths[0]))
    drafts = []
    for size in sizes(context, options.multiple):
        chunking = fixed_chunks(batch.lengths, size, rates_of(cost))
        law = constant(chunking.sizes, cost.stages)
        drafts.append(uniform_draft(batch, chunking, law, cost, options, f"size {size}"))
    return fastest(drafts)
