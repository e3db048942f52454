"""Watcher of torchrun, which ends a rank after torchrun was killed.

torchrun ends its ranks when it fails or is terminated. If torchrun is killed, it cannot end them,
and the ranks would train on without supervision. Other launchers are not watched: the daemons of
srun and mpirun end their processes themselves. A job started from a shell is not watched, because
the shell may exit during a job under nohup or setsid.

A thread watches torchrun. The kernel's parent-death signal is not sufficient: it watches the direct
parent, which may be a wrapper (``torchrun --no-python run.sh``), and it ends a rank without a
message.
"""

import os
import sys
import threading
import time

import psutil

from megatron_epp.mcore.job.emergency_exit import SAVES, leave

EVERY_SECONDS = 1.0
_RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun sets it for the ranks that it starts
_watching: set[int] = set()  # id of this process if it watches; a forked process has another id


def end_with_launcher() -> None:
    """Start a thread that ends this process when the torchrun that started it has ended.

    If a checkpoint is being written, the thread waits for it first. Without torchrun, the function
    does nothing.

    Call this function as early as possible. If torchrun is killed while this process imports torch
    and Megatron, the process gets another parent, and the thread cannot notice it. That case is
    detected by a connection to torchrun's store
    (:func:`~megatron_epp.mcore.job.job_exit.require_launcher`).
    """
    leader = None if os.getpid() in _watching else _leader()
    if leader is not None:
        _watching.add(os.getpid())
        name, watched = "megatron_epp-launcher", (leader, leader.ppid())
        threading.Thread(target=_watch, args=watched, name=name, daemon=True).start()


def _leader() -> psutil.Process | None:
    """Return the leader of this process's session, a child of torchrun; None without torchrun."""
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
