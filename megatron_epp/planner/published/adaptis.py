"""Schedule of AdaPtis (`adaptis`, arXiv 2509.23722).

Unsliced documents are packed to the context. The best of a few warm-ups is chosen, with split or
unsplit backwards. Placement and layer partition are those of the job.
"""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.policies import warm_up_policies
from megatron_epp.planner.published.packing import packed
from megatron_epp.planner.recompute.uniform import ScoredDraft, uniform_draft


def draft(
    batch: SortedBatch,
    cost: Cost,
    options: Options,
    below: float = np.inf,
    splits: Sequence[bool] = (True, False),
) -> ScoredDraft | None:
    """Return the best draft over warm-ups, with unsplit and split backwards.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: time limit in seconds. The caller needs a draft only if it is faster.
        splits: values of Policy.split to try.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    chunking, note = packed(batch, cost, options)
    policies = list(warm_up_policies(cost.layout.placement.place, chunking.sizes, splits))
    return uniform_draft(batch, chunking, policies, cost, options, note, below=below)
