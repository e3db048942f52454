"""Long work that one rank does for all; the others wait as long as it shows that it is at work."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_epp.runtime.consensus import broadcast_text

# Seconds between two signs of life; groups time out after minutes.
BEAT_SECONDS = 5.0


def done_by_rank_zero(
    work: Callable[[Callable[[], None]], str],
    group: dist.ProcessGroup,
    beat_seconds: float = BEAT_SECONDS,
) -> str:
    """Return value of ``work(beat)`` on rank 0 of ``group``, a gloo group, on every rank.
    Collective.

    ``work`` calls ``beat()`` often. A rank fails that hears nothing for the group's timeout.

    PlanError: on every rank, with the line of the ValueError or OSError that ``work`` raised
    """
    at_work = torch.ones(1, dtype=torch.int64)
    if group.rank() != 0:
        while at_work:
            dist.broadcast(at_work, group=group, group_src=0)
        return broadcast_text(None, None, group)
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= beat_seconds:
            dist.broadcast(at_work, group=group, group_src=0)
            last = time.monotonic()

    result, error = None, None
    try:
        result = work(beat)
    except (ValueError, OSError) as refusal:
        error = " ".join(str(refusal).split())
    dist.broadcast(torch.zeros_like(at_work), group=group, group_src=0)
    return broadcast_text(result, error, group)
