"""End of a job: done, refused because of the user's input, or after the loss of a neighbour.

A rank that loses a link prints one line and exits with status 1: no input was wrong. A refusal
means one line from one rank, and status 2 from every rank. torchrun ends the other ranks as soon as
one has failed, so the ranks meet before they exit. They meet in the key-value store. A collective
would need every rank, and one that is busy elsewhere would never join.
"""

from __future__ import annotations

import gc
import linecache
import logging
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import CheckpointException

from megatron_epp.ir.errors import for_terminal
from megatron_epp.mcore.job.emergency_exit import SAVES, end_now
from megatron_epp.mcore.job.launch_environment import rank_of
from megatron_epp.runtime.executor import LinkLost

logger = logging.getLogger(__name__)

BAD_INPUT, FAILED = 2, 1
# Exceptions that may be a refusal; the last two are no Exception.
ENDINGS = (Exception, SystemExit, CheckpointException)
# How long to wait for the other ranks. Before there is a process group, all ranks read the same
# flags and will come, as slowly as they import. Afterwards, a rank in a collective never comes.
PATIENCE_AT_START_SECONDS, PATIENCE_SECONDS = 30.0, 5.0
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Part of Megatron's message, and the advice that replaces Megatron's.
_REMEDIES = {
    "sharding type": "The optimizer's states were saved for one layout; save with "
    "--dist-ckpt-optim-fully-reshardable to resume with other degrees, and resume this checkpoint "
    "with its own, or with --no-load-optim",
    "OptimizerParamScheduler:": "(of --train-iters, --train-samples, --lr and their kin); give "
    "--override-opt-param-scheduler for the flags' values, or --use-checkpoint-opt-param-scheduler "
    "for the checkpoint's",
}
_REFUSED, _REPORTED = "megatron_epp/refused", "megatron_epp/spoken"


def finish() -> None:
    """Leave the process groups together, after the last collective of a finished job.

    Python must not shut down while a gloo worker thread still cleans up its last operation. The
    thread then waits for the interpreter's lock, is ended instead, and aborts the process: about
    one run in fifteen ended with status -6 after everything was trained and saved.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    SAVES.look()  # the save after the last iteration
    distributed.barrier()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    # Modules and optimizers hold groups in reference cycles; a group joins its threads when freed.
    gc.collect()


def is_users_mistake(error: BaseException) -> bool:
    """Return whether ``error`` is about the user's input, and not a bug.

    It is if this package's own code raised it as a ValueError or as one of this package's errors. A
    ValueError from torch or Megatron keeps its traceback.
    """
    from_package = type(error).__module__.startswith("megatron_epp.")
    if not (from_package or isinstance(error, ValueError)):
        return False
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame
    name = innermost.f_globals.get("__name__", "") if innermost is not None else ""
    return str(name).startswith("megatron_epp.")


def refused_by_megatron(error: BaseException) -> ValueError | None:
    """Return Megatron's exception as a ValueError if it refuses the user's input, else None.

    It does if Megatron raises it on purpose (an assert or a raise) before training. An exception in
    a call from this package does not count: the call could be wrong. Megatron checks many flags
    only when it builds the component. If it cannot read a checkpoint, it exits without an
    exception, with status 0.
    """
    frames = traceback.extract_tb(error.__traceback__)
    modules = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.name for frame in frames]
    if isinstance(error, CheckpointException) and "load_checkpoint" in names and error.failures:
        first, _ = next(iter(error.failures.values()))
        return ValueError(f"--load: {reason(first)}; expected a checkpoint of the flags' model")
    if not frames or not modules[-1].startswith("megatron.") or "pretrain" not in names:
        return None
    after = names.index("pretrain")
    elastic = any(name.startswith("megatron_epp.") for name in modules[after:])
    if elastic or not {"train", "evaluate"}.isdisjoint(names[after:]):
        return None
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
    if isinstance(error, SystemExit):
        asked = "--exit-on-missing-checkpoint" in sys.argv
        if error.code or asked or not modules[-1].endswith(".checkpointing"):
            return None
        return ValueError(f"--load: Megatron ended at {where}, as the lines before say; check it")
    if not (frames[-1].line or "").startswith(("assert", "raise")):
        return None
    for part, remedy in _REMEDIES.items():
        if part in str(error):
            return ValueError(f"{reason(error).split(' Please ')[0]} {remedy}")
    return ValueError(f"{reason(error)} (Megatron, {where})")


def reason(error: BaseException) -> str:
    """Return one line for an exception of Megatron's: its message, else its place and condition."""
    message = " ".join(str(error).split())
    if message and not isinstance(error, KeyError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    source = " ".join(" ".join(lines).split())
    return (
        f"Megatron refuses the flags at {os.path.basename(frame.filename)}:{frame.lineno}: {source}"
    )


def refuse_and_exit(error: BaseException) -> NoReturn:
    """End this rank with status 2 (a lost link: 1); one of the ranks prints the line.

    The process ends immediately, because ranks in a collective would block an orderly shutdown. Its
    child processes, such as the planner's, end with it.
    """
    logger.debug("where the refusal came from", exc_info=error)
    status = FAILED if isinstance(error, LinkLost) else BAD_INPUT
    try:
        may_report, alone = _may_report()
        if may_report:
            rank, _ = rank_of()
            where = f" (rank {rank} on {socket.gethostname()})" if alone else ""
            print(f"megatron_epp: error: {for_terminal(str(error))}{where}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if status == BAD_INPUT:
            _finish_saves()
    finally:
        end_now(status)


def _finish_saves() -> None:
    """Finalise asynchronous saves if all ranks are refused and have met: it takes all of them."""
    _, ranks = rank_of()
    if SAVES.pending() and (ranks <= 1 or _meeting_place().add(_REFUSED, 0) >= ranks):
        from megatron.training.async_utils import maybe_finalize_async_save

        maybe_finalize_async_save(blocking=True)


def require_launcher() -> None:
    """End this rank with one line if torchrun, which keeps the store, has already ended.

    The thread that watches torchrun (launcher.py) cannot see that it existed before.
    """
    if os.environ.get(AGENT_STORE) != "True":
        return
    try:
        _meeting_place()
    except RuntimeError:
        rank, place = (os.environ.get(name, "") for name in ("RANK", "MASTER_ADDR"))
        print(
            f"megatron_epp: rank {rank} ends: torchrun is gone (its store on {place} does not "
            f"answer in {PATIENCE_AT_START_SECONDS:.0f} s)",
            file=sys.stderr,
        )
        end_now(FAILED)


def _may_report() -> tuple[bool, bool]:
    """Wait for the other ranks; return whether this rank reports, and whether any is not refused.

    Rank 0 reports, or, if it is not refused, the first rank that is.
    """
    rank, ranks = rank_of()
    if ranks <= 1:
        return True, False
    try:
        store = _meeting_place()
        # Rank 0 sets the key before it is counted, so a rank that counts all ranks finds it set.
        is_first = rank == 0 and store.add(_REPORTED, 1) == 1
        order = store.add(_REFUSED, 1)
        started = torch.distributed.is_initialized()
        patience = PATIENCE_SECONDS if started else PATIENCE_AT_START_SECONDS
        deadline = time.monotonic() + patience
        while store.add(_REFUSED, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        if rank != 0:
            is_first = order == 1 and store.add(_REPORTED, 1) == 1
        return is_first, store.add(_REFUSED, 0) < ranks
    except Exception:
        # There is no store, or it ended with rank 0, which has reported then; the job ends anyway.
        return rank == 0, False


def _meeting_place() -> Any:
    """Return the process group's store; before there is one, torchrun's store."""
    distributed = torch.distributed
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    return torchrun_store()


def torchrun_store() -> Any:
    """Return the store that torchrun keeps.

    Raises:
        RuntimeError: torchrun did not start this process, or its store does not answer.
    """
    distributed = torch.distributed
    if os.environ.get(AGENT_STORE) != "True":
        raise RuntimeError("not started by torchrun: there is no store yet")
    store = distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        world_size=None,
        is_master=False,
        timeout=timedelta(seconds=PATIENCE_AT_START_SECONDS),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"megatron_epp/{attempt}", store)
