"""Files of a job: written atomically, in folders that one job at a time claims.

A job may be killed while it writes, its disk may be full, and another job may use the same folder.
In all of these cases, files stay readable, and training continues if it can.
"""

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from megatron_epp.safe_files import bounded_text, open_regular, replace_file

logger = logging.getLogger(__name__)

LOCK_NAME = "epp-job.lock"
# Time that a finished job may need to release its lock: a forked process writes its checkpoint.
LOCK_PATIENCE_SECONDS = 5.0
_SCRATCH = "megatron_epp-"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees either the old or the new text.

    This also holds after a power failure; see :func:`~megatron_epp.safe_files.replace_file`. The
    folder is created if missing.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text, durable=True)


class BestEffort:
    """Runner of optional actions: it logs the first failure of each kind, and raises nothing."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def __call__(self, what: str, action: Callable[[], object]) -> None:
        """Run ``action``; log an exception once per ``what``, the name of the lost data."""
        try:
            action()
        except Exception as error:
            if what not in self._reported:
                self._reported.add(what)
                message = " ".join(str(error).split()) or "no reason given"
                logger.warning(
                    "%s cannot be kept (%s: %s); training goes on without, and this is not told "
                    "again",
                    what, type(error).__name__, message,
                )  # fmt: skip


# ------------------------------------------------------------------ one job per folder


def claim(
    folders: Sequence[tuple[str, str | None]], patience_seconds: float = LOCK_PATIENCE_SECONDS
) -> list[TextIO]:
    """Create and lock folders for this job, and return the open lock files.

    Each folder gets a lock file that names this process and its host. A folder stays locked while
    its lock file is open. The operating system releases the locks when the process and its forks
    have ended, even if they were killed.

    Args:
        folders: pairs (flag, folder); the flag only names the folder in error messages, and an
            empty folder or None is skipped.
        patience_seconds: maximum time to wait until another job releases the folders.

    Raises:
        ValueError: a folder cannot be created or written, or a running job has locked it.
    """
    deadline = time.monotonic() + patience_seconds
    locks: dict[Path, TextIO] = {}
    for flag, folder in folders:
        if not folder:
            continue
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder).resolve() / LOCK_NAME
            if path not in locks:
                locks[path] = os.fdopen(open_regular(path), "a+", encoding="utf-8")
        except OSError as error:
            where = "" if error.filename in (folder, str(folder)) else f"{LOCK_NAME}: "
            raise ValueError(
                f"{flag} {folder}: {where}{error.strerror}; name a folder "
                "that can be written, without links or pipes under the names of a job's files"
            ) from error
        while not (locked := _lock(locks[path])) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not locked:
            locks[path].seek(0)
            owner = locks[path].read().strip() or "it does not say which"
            raise ValueError(
                f"{flag} {folder}: another job that still runs writes this folder ({owner}); name "
                "another folder, or end that job"
            )
        locks[path].truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        locks[path].write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        locks[path].flush()
        os.fsync(locks[path].fileno())  # so that other hosts see it, too
    return list(locks.values())


def owner_of(folder: str, owner: str = "", patience_seconds: float = LOCK_PATIENCE_SECONDS) -> str:
    """Return the text of the lock in ``folder``, which names the job that claimed it.

    Wait up to ``patience_seconds`` until the text contains ``owner``, because a shared file system
    may show a new text late. If the folder or its lock is missing, the result says so.
    """
    deadline, words = time.monotonic() + patience_seconds, "no such folder"
    while os.path.isdir(folder):
        try:
            words = bounded_text(Path(folder) / LOCK_NAME, "a job's lock", "replace").strip()
        except (OSError, ValueError):
            words = f"no {LOCK_NAME}"
        if owner in words or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return words


def _lock(file: TextIO) -> bool:
    """Try to lock ``file``, and return whether it is locked.

    A file system without locks counts as locked.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s: no lock (%s); nothing keeps a second job out", file.name, error)
    return True


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """Create a temporary folder, named after ``what``, that is removed at the end of this context.

    First remove the folders that killed processes left with the same ``what``.
    """
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_SCRATCH}{what}-*"):
        _remove_if_left(left)
    folder, lock = _locked_scratch(what)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _locked_scratch(what: str) -> tuple[Path, TextIO]:
    """Return a new folder and its locked file.

    If another process removes the folder before it is locked, another folder is created.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{what}-"))
        with suppress(FileNotFoundError):
            lock = (folder / LOCK_NAME).open("a")
            if _lock(lock) and os.fstat(lock.fileno()).st_nlink:
                return folder, lock
            lock.close()


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / LOCK_NAME).open("r+") as lock:
            if _lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # it belongs to another user, or its creator has not locked it yet
