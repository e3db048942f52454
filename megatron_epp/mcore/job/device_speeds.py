"""Speeds of a job's devices, saved next to the checkpoint for each host and local rank.

A job without a cost model measures the speeds of its ranks at its start, and every job updates the
speeds during training. A job that resumes with --epp-layouts orders its ranks by the saved speeds.
"""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_epp.control.files import write_atomically
from megatron_epp.runtime.groups import Groups
from megatron_epp.safe_files import bounded_text

SPEEDS_FILE = "epp-device-speeds.json"  # {"host local-rank": times as slow as the fastest, ...}
_MOST = 1e3


def this_rank() -> str:
    """Return the name of this rank's device: host name and local rank."""
    return f"{socket.gethostname()} {os.environ.get('LOCAL_RANK', '0')}"


def read_speeds(folder: str | None) -> dict[str, float] | None:
    """Return device -> time relative to the fastest device (1 or more); None without a file.

    Raises:
        ValueError: The file is damaged.
    """
    path = Path(folder or "") / SPEEDS_FILE
    if not folder or not path.exists():
        return None
    try:
        kept = json.loads(bounded_text(path, "the speeds of a job's devices"))
        if not isinstance(kept, dict) or not all(
            isinstance(factor, int | float) and 1 <= factor <= _MOST for factor in kept.values()
        ):
            raise ValueError("expected an object from a device to a number from 1 on")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: no speeds of devices ({error}); delete the file: devices then count as alike "
            "until they are measured again"
        ) from error
    return kept


def keep_speeds(slowness: Sequence[float], groups: Groups, folder: str | None) -> None:
    """Write the slowness of this job's devices to ``folder``, on rank 0. Collective.

    Args:
        slowness: Times relative to the fastest device: one value per pipeline rank of every
            replica, or one per pipeline rank for all replicas. Empty if all are equally fast.
        groups: The job's process groups.
        folder: Folder of the checkpoints. If it is None, the function writes nothing.

    Raises:
        OSError: The file cannot be written.
    """
    own = this_rank(), groups.replica * groups.pipeline_size + groups.pipeline_rank
    every: list[Any] = [None] * groups.control.size()
    dist.all_gather_object(every, own, group=groups.control)
    if groups.control.rank() != 0 or not folder:
        return
    before = read_speeds(folder)
    of_places = slowness or (1.0,)
    measured = {device: of_places[place % len(of_places)] for device, place in every}
    if before is not None or set(measured.values()) != {1.0}:
        kept = json.dumps({**(before or {}), **measured}, indent=1)
        write_atomically(Path(folder) / SPEEDS_FILE, kept + "\n")
