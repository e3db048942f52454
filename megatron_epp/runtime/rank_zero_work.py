"""Long work of rank 0 with heartbeats, so that the waiting ranks do not time out."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_epp.runtime.consensus import broadcast_text

# Seconds between heartbeats; process groups time out after minutes.
BEAT_SECONDS = 5.0


def done_by_rank_zero(
    work: Callable[[Callable[[], None]], str],
    group: dist.ProcessGroup,
    beat_seconds: float = BEAT_SECONDS,
) -> str:
    """Run ``work(beat)`` on rank 0 of ``group``, and return its result on every rank.

    All ranks of the group must call this function. ``beat()`` sends a heartbeat to the other ranks,
    and ``work`` must call it often. A rank fails if it receives no heartbeat within the group's
    timeout.

    Args:
        work: function that rank 0 runs; it returns a text.
        group: a gloo group.
        beat_seconds: minimum seconds between two heartbeats.

    Raises:
        PlanError: on every rank, with the message of the ValueError or OSError of ``work``.
        RuntimeError: if a rank receives no heartbeat in time.
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
