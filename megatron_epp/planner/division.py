"""Samples divided over replicas by the seconds that they take, for loops that divide by themselves.

A sample's time is not its length: attention grows with the square. No torch is imported.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.profile import Profile
from megatron_epp.planner.replicas import Deals, balance_replicas


def divided(
    lengths: Sequence[int],
    replicas: int,
    model: str,
    device: str,
    profile: str | Path | None,
    same_count: bool,
) -> Deals:
    """As :func:`megatron_epp.divide`."""
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
    measured = None if profile is None else Profile.load(str(profile))
    # Seconds alone are asked for: whether the model fits on one device is another question.
    cost = named_cost(model, device, pp=1, profile=measured, memory_budget_gib=math.inf)
    most = len(lengths) // replicas if same_count else None
    return balance_replicas(lengths, cost, replicas, most=most)
