"""Schedule of AdaPtis (`adaptis`, arXiv 2509.23722).

Unsliced documents are packed to the context. Simulation chooses the warm-up, and whether to
split backwards. Placement and layer partition are those of the job.
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
    """Return the fastest draft (plan as arrays) over several warm-ups and kinds of backward.

    Args:
        batch: the documents, sorted by length.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        below: seconds of an iteration; the caller needs only a draft that takes less.
        splits: values of Policy.split to try.

    Returns:
        The draft, or None if lower bounds show that no draft is faster than ``below``.
    """
    chunking, note = packed(batch, cost, options)
    policies = list(warm_up_policies(cost.layout.placement.place, chunking.sizes, splits))
    return uniform_draft(batch, chunking, policies, cost, options, note, below=below)
