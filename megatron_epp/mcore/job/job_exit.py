"""End of a job: after success, after an error in the user's input, or after the loss of a rank.

If the user's input is wrong, one rank prints one line, and every rank exits with status 2. torchrun
ends all ranks as soon as one rank has failed, so the ranks wait for each other before they exit.
They count the failed ranks in the key-value store, because a collective would block if some rank
does not fail. A rank that loses the connection to another rank prints one line and exits with
status 1.
"""

from __future__ import annotations

import gc
import linecache
import logging
import os
import re
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
from megatron_epp.mcore.patching import patch_points
from megatron_epp.runtime.executor import LinkLost
from megatron_epp.runtime.store_answer import answer_within

logger = logging.getLogger(__name__)

BAD_INPUT, FAILED = 2, 1
# Exceptions that may mean wrong input; the last two are not subclasses of Exception.
ENDINGS = (Exception, SystemExit, CheckpointException)
# How long to wait for the other ranks. Before the process group exists, every rank finds the error,
# but slow imports may delay it. Later, ranks that block in a collective never find the error.
PATIENCE_AT_START_SECONDS, PATIENCE_SECONDS = 30.0, 5.0
ANSWER_SECONDS = 30.0  # limit on the store's answers, beyond this wait
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Advice on a learning-rate schedule that is not the checkpoint's.
SCHEDULE_REMEDY = (
    "give --override-opt-param-scheduler for the flags' values, or "
    "--use-checkpoint-opt-param-scheduler for the checkpoint's"
)
_REFUSED, _REPORTED = "megatron_epp/refused", "megatron_epp/spoken"


def finish() -> None:
    """Destroy the process groups on all ranks, at the end of a successful job.

    Python must not shut down while a gloo worker thread still cleans up its last operation.
    Otherwise, Python ends the thread while the thread waits for the interpreter's lock, and the
    process aborts. Without this function, about one run in fifteen ended with status -6 after its
    last save.
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
    # Reference cycles of modules and optimizers keep groups alive; a freed group joins its threads.
    gc.collect()


def is_users_mistake(error: BaseException) -> bool:
    """Return whether ``error`` reports wrong input of the user, and not a bug.

    The result is True if code of this package has raised the error, and the error is a ValueError
    or of an error class of this package. A ValueError from torch or Megatron counts as a bug.
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
    """Return Megatron's exception as a ValueError if it refuses the user's input, otherwise None.

    Megatron checks many flags only when it builds a component. So an exception counts as a refusal
    if an assert or raise statement of Megatron raises it before training. Exceptions in calls from
    this package do not count, because this package could be wrong. A CheckpointException counts if
    it occurs while Megatron loads a checkpoint. SystemExit with status 0 counts if Megatron raises
    it for an unreadable checkpoint, unless --exit-on-missing-checkpoint is set.
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
    # Patch points pass Megatron's calls on.
    callers = [name for name in modules[after:] if name != patch_points.__name__]
    elastic = any(name.startswith("megatron_epp.") for name in callers)
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
    if "OptimizerParamScheduler:" in str(error):
        flags = "(of --train-iters, --train-samples, --weight-decay and their kin)"
        return ValueError(f"{reason(error)} {flags}; {SCHEDULE_REMEDY}")
    return ValueError(f"{reason(error)} (Megatron, {where})")


def lost_rank(error: BaseException) -> LinkLost | None:
    """Return a LinkLost if ``error`` shows that another rank is lost, otherwise None.

    Such errors occur in Megatron's collectives, during a save or a reduction of gradients. torch
    raises a RuntimeError for gloo, and other error classes for a store. The result is also None for
    a LinkLost (from a link between stages), and before the process group exists.
    """
    distributed = torch.distributed
    of_store = (distributed.DistNetworkError, distributed.DistStoreError)
    if not (isinstance(error, of_store) or "gloo/transport" in str(error)):
        return None
    if isinstance(error, LinkLost) or not distributed.is_initialized():
        return None
    frames = traceback.extract_tb(error.__traceback__)
    names = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    pairs = zip(frames, names, strict=True)
    in_megatron = [frame for frame, name in pairs if name.startswith("megatron")]
    place = in_megatron[-1] if in_megatron else frames[-1]
    where = f"{place.name} ({os.path.basename(place.filename)}:{place.lineno})"
    return LinkLost(f"{where}: another rank is lost: {reason(error)[:300]}")


def reason(error: BaseException) -> str:
    """Return the message of Megatron's exception in one line.

    Without a message, and for a KeyError, return the flags that the failed statement reads, and its
    source line.
    """
    message = " ".join(str(error).split())
    if message and not isinstance(error, KeyError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    source = " ".join(" ".join(lines).split())
    read = dict.fromkeys(re.findall(r"\bargs\.(\w+)", source))
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in read)
    where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return f"Megatron refuses the flags{flags and f' ({flags})'} at {where}: {source}"


def refuse_and_exit(error: BaseException) -> NoReturn:
    """End this rank with status 2 (1 for a LinkLost); one of the ranks prints the error.

    The process ends immediately, because ranks in a collective would block an orderly shutdown. The
    function also ends child processes, such as planner processes.
    """
    logger.debug("where the refusal came from", exc_info=error)
    status = FAILED if isinstance(error, LinkLost) else BAD_INPUT
    try:
        may_report, alone = _may_report(status == FAILED)
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
    """Finalise asynchronous saves (a collective call), if all ranks have reached this point."""
    _, ranks = rank_of()

    def all_are_here() -> bool:
        return ranks <= 1 or _meeting_place().add(_REFUSED, 0) >= ranks

    if SAVES.pending() and answer_within(ANSWER_SECONDS, all_are_here, otherwise=False):
        from megatron.training.async_utils import maybe_finalize_async_save

        maybe_finalize_async_save(blocking=True)


def require_launcher() -> None:
    """End this rank with status 1 and one line if torchrun, which serves the store, has ended.

    Later, a thread watches torchrun (launcher.py), but it does not notice an earlier end. Without
    torchrun's store, the function does nothing.
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


def _may_report(lost: bool = False) -> tuple[bool, bool]:
    """Wait for the other ranks; return (this rank prints the error, some rank has no error).

    Rank 0 prints its error. If rank 0 has no error, the first rank with an error prints it. If the
    store does not answer, because the process that serves it is stopped, each rank prints its own.
    ``lost`` is whether another rank is lost. If that is rank 0, its store may be lost as well.
    """
    rank, ranks = rank_of()
    if ranks <= 1:
        return True, False
    started = torch.distributed.is_initialized()
    patience = PATIENCE_SECONDS if started else PATIENCE_AT_START_SECONDS

    def ask() -> tuple[bool, bool]:
        store = _meeting_place()
        # Rank 0 sets the key before it is counted, so a rank that counts all ranks finds it set.
        is_first = rank == 0 and store.add(_REPORTED, 1) == 1
        order = store.add(_REFUSED, 1)
        deadline = time.monotonic() + patience
        while store.add(_REFUSED, 0) < ranks and time.monotonic() < deadline:
            time.sleep(0.02)
        if rank != 0:
            is_first = order == 1 and store.add(_REPORTED, 1) == 1
        return is_first, store.add(_REFUSED, 0) < ranks

    try:
        return answer_within(patience + ANSWER_SECONDS, ask, otherwise=(True, True))
    except Exception:
        # There is no store, or it has ended with rank 0. Unless rank 0 was killed (``lost``), it
        # has then printed its error.
        return rank == 0 or lost, lost


def _meeting_place() -> Any:
    """Return the process group's store; before the process group exists, torchrun's store."""
    distributed = torch.distributed
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    return torchrun_store()


def torchrun_store() -> Any:
    """Return a client of the key-value store that torchrun serves.

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
