"""Watch on torchrun: a rank ends soon after the launcher that started it was killed.

torchrun ends its ranks when it fails or is terminated. If it is killed, it cannot, and the ranks
would train on without supervision. Only torchrun is watched. The daemons of srun and mpirun end the
processes that they started, and a plain launch has no launcher: the shell of a job under nohup or
setsid may exit.

A thread watches, instead of the kernel's parent-death signal. That signal reports the direct
parent, which may be a wrapper (``torchrun --no-python run.sh``), and ends a rank without a message.
"""

import os
import sys
import threading
import time

import psutil

from megatron_epp.mcore.job.emergency_exit import SAVES, leave

EVERY_SECONDS = 1.0
_RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun sets it for the ranks that it starts
_watching: set[int] = set()  # this process, once it watches; a forked process has another id


def end_with_launcher() -> None:
    """Start a thread that ends this process when the torchrun that started it is gone.

    Without torchrun, nothing happens. The thread waits for a checkpoint that is being written.

    Call it before anything else. torchrun may be killed while this process imports torch and
    Megatron, and the process then has another parent. A launcher that ended earlier is detected at
    the store (:func:`~megatron_epp.mcore.job.job_exit.require_launcher`).
    """
    leader = None if os.getpid() in _watching else _leader()
    if leader is not None:
        _watching.add(os.getpid())
        name, watched = "megatron_epp-launcher", (leader, leader.ppid())
        threading.Thread(target=_watch, args=watched, name=name, daemon=True).start()


def _leader() -> psutil.Process | None:
    """Return the child of torchrun that is this process or its ancestor; it leads a session."""
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
