"""Division of samples over replicas by predicted time, for external training loops.

The time of attention grows with the square of the length, so the time of a sample is not
proportional to its length. This module does not import torch.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.profile import Profile
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.replicas import balance_replicas
from megatron_epp.planner.tree_division import Assignments, divided_trees


def divided(
    lengths: Sequence[int],
    replicas: int,
    model: str,
    device: str,
    profile: str | Path | None,
    same_count: bool,
    prefixes: PrefixForest | None = None,
) -> Assignments:
    """Return the indices of the samples of every replica.

    Arguments and errors are those of :func:`megatron_epp.divide`.
    """
    if any(length < 1 for length in lengths):
        raise ValueError(f"divide: a length of {min(lengths)}; expected at least 1 token")
    if not 1 <= replicas <= len(lengths):
        raise ValueError(
            f"divide: {len(lengths)} samples over {replicas} replicas; expected at least one each"
        )
    if same_count and len(lengths) % replicas:
        raise ValueError(
            f"divide(same_count=True): {len(lengths)} samples over {replicas} replicas; expected a "
            "multiple"
        )
    measured = None if profile is None else Profile.load(str(profile)).without_slowness
    # Only seconds matter here, not whether the model fits one device.
    cost = named_cost(model, device, pp=1, profile=measured, memory_budget_gib=math.inf)
    most = len(lengths) // replicas if same_count else None
    if prefixes is None:
        return balance_replicas(lengths, cost, replicas, most=most)
    try:
        prefixes.require(lengths)
    except ValueError as error:
        raise ValueError(f"divide(prefixes=): {error}") from None
    return divided_trees(prefixes, rates_of(cost), replicas, most)
