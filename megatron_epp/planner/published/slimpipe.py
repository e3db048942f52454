"""Schedule of SlimPipe (`slimpipe`, arXiv 2504.14519) without its context exchange.

All slices have the same size. A document that is as long as the context has n slices, where n is a
multiple of the number of pipeline ranks. Backwards are not split. Activations are offloaded if
memory is tight and the lever `offload` is on.
"""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import FULL, OFFLOAD
from megatron_epp.planner.chunks.block import folded
from megatron_epp.planner.chunks.fixed_size import fixed_chunks
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.policies import warm_up_policies
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.recompute.uniform import ScoredDraft, uniform_draft

RANK_SLICES = (1, 2, 4)  # factors on the number of ranks
MOST_SLICES = 2048


def draft(
    batch: SortedBatch, cost: Cost, options: Options, below: float = np.inf
) -> ScoredDraft | None:
    """Return the fastest draft (plan as arrays) over a few slice sizes.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    context, rates = max(options.context, int(batch.lengths[0])), rates_of(cost)
    offloads = "offload" in options.levers and cost.layout.profile.host_bytes_per_second > 0
    drafts: list[ScoredDraft] = []
    for number, times in enumerate(RANK_SLICES):
        each = -(-context // (times * cost.layout.placement.ranks))
        size = -(-each // cost.multiple) * cost.multiple
        slices = fixed_chunks(batch.lengths, size, rates)
        if number and slices.count > MOST_SLICES:
            break
        chunking = folded(slices, options.lockstep, rates)
        policies = list(warm_up_policies(cost.layout.placement.place, chunking.sizes, (False,)))
        modes = (OFFLOAD, FULL) if offloads else (FULL,)
        how = f"slices of {size}", modes, below
        drafted = uniform_draft(batch, chunking, policies, cost, options, *how)
        drafts += [drafted] if drafted is not None else []
    return min(drafts, key=lambda each: each.rank, default=None)
