"""A rank ends soon after the launcher that would have ended it was killed.

torchrun ends its ranks when it fails or is told to end; killed outright it cannot, and they would
train on without anybody to restart them. It alone is watched. srun's and mpirun's daemons end what
they started themselves, and a plain launch has no launcher: the shell of a job under nohup or
setsid may go as it likes.

Watched by a thread, and not by the kernel's parent-death signal: that one speaks of the direct
parent, which a wrapper (``torchrun --no-python run.sh``) is, and ends a rank without a word.
"""

import os
import sys
import threading
import time

import psutil

from megatron_epp.mcore.job.emergency_exit import SAVES, leave

EVERY_SECONDS = 1.0
_RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun gives it to those that it starts
_watching: set[int] = set()  # this process, once it watches; not one that is forked from it


def end_with_launcher() -> None:
    """Watch the torchrun that started this process, if one did, from a thread.

    Called first of all: torchrun may be killed while this process imports torch and Megatron, and
    whoever asks for its parent afterwards finds another. What happens before is found out at the
    store (:func:`~megatron_epp.mcore.job.job_exit.require_launcher`).
    """
    leader = None if os.getpid() in _watching else _leader()
    if leader is not None:
        _watching.add(os.getpid())
        name, watched = "megatron_epp-launcher", (leader, leader.ppid())
        threading.Thread(target=_watch, args=watched, name=name, daemon=True).start()


def _leader() -> psutil.Process | None:
    """torchrun's child that this process is or descends from: it leads a session of its own."""
    if _RUN_ID not in os.environ:
        return None
    try:
        leader = psutil.Process(os.getsid(0))
        return leader if _RUN_ID in leader.environ() else None
    except psutil.Error:
        return None


def _watch(leader: psutil.Process, launcher: int) -> None:
    while _parent(leader) == launcher:
        SAVES.look()
        time.sleep(EVERY_SECONDS)
    SAVES.ask()
    rank = os.environ.get("RANK", "0")
    message = f"megatron_epp: rank {rank} ends: torchrun (process {launcher}) is gone"
    if SAVES.under_way():
        message += " (after the checkpoint that is being written or asked for)"
    print(message, file=sys.stderr, flush=True)
    leave(1)


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None
