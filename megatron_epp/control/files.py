"""Files that a job keeps in folders: written whole or not at all, by one job at a time.

A job may be killed while it writes, its disk may be full, and another job may have been given the
same folder. None of these may leave a file that cannot be read, or end a training that could go on.
"""

import fcntl
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megatron_epp.safe_files import bounded_text, open_regular, replace_file

logger = logging.getLogger(__name__)

LOCK_NAME = "epp-job.lock"
# How long a job that has just ended may take to go: a checkpoint's writer is a process it forked.
LOCK_PATIENCE_SECONDS = 5.0
_SCRATCH = "megatron_epp-"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, whenever it comes, finds the old text or the
    new one, after a power failure too; see :func:`~megatron_epp.safe_files.replace_file`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text, durable=True)


class BestEffort:
    """Does what training can do without; the first failure of each kind is a warning."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def __call__(self, what: str, action: Callable[[], object]) -> None:
        """``what`` names what is lost if ``action`` fails, whatever it fails of."""
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


# ------------------------------------------------------------------ one job a folder


def claim(
    folders: Sequence[tuple[str, str | None]], patience_seconds: float = LOCK_PATIENCE_SECONDS
) -> list[TextIO]:
    """Make (flag, folder) this job's own for as long as the returned files are open.

    ValueError: a folder cannot be written, or another job that lives writes it. A job that died,
    however it died, holds nothing: the lock goes with its process, and with those that it forked.
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
        os.fsync(locks[path].fileno())  # for other hosts, too
    return list(locks.values())


def owner_of(folder: str, owner: str = "", patience_seconds: float = LOCK_PATIENCE_SECONDS) -> str:
    """Return which job has claimed ``folder``, in its lock's words, as this host sees them.

    Waits for ``owner``: a shared file system may show them late.
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
    """Whether the lock is ours now. A file system without locks cannot tell: then it is, too."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s: no lock (%s); nothing keeps a second job out", file.name, error)
    return True


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """A folder for temporary files; those that killed processes left behind go, too."""
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_SCRATCH}{what}-*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{what}-"))
    with (folder / LOCK_NAME).open("a") as lock:
        _lock(lock)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / LOCK_NAME).open("r+") as lock:
            if _lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # another user's, or not locked yet by who is just making it
