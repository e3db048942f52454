"""Files that users name or that a job keeps: read within a bound, written whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_TEXT_BYTES = 16 << 20  # of a text that a person writes or a job keeps: far above any


def read_bounded(path: str | Path, most_bytes: int, expected: str) -> bytes:
    """Return the bytes of the file at ``path``.

    A ValueError where they are more than ``most_bytes``, as of a device without end, or where a
    pipe lies in the folder: opening it would wait for somebody to write. A shell's ``<(command)``
    is a pipe without a place in any folder, and is read. OSError: it cannot be read.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode) and os.path.exists(os.path.realpath(path)):
        raise ValueError(f"is a pipe; expected {expected} in a regular file")
    with open(path, "rb") as file:
        return read_at_most(file, most_bytes, expected)


def read_at_most(file: BinaryIO, most_bytes: int, expected: str) -> bytes:
    """Return the rest of ``file``. ValueError: it is longer than ``most_bytes``."""
    data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes >> 20} MiB; expected {expected}")
    return data


def bounded_lines(path: str | Path, expected: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of every line of the file at ``path``, of any length itself.

    ValueError: a line is longer than MOST_TEXT_BYTES, with the file and its number.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_TEXT_BYTES + 1), b""), 1):
            if len(line) > MOST_TEXT_BYTES:
                size = f"longer than {MOST_TEXT_BYTES >> 20} MiB"
                raise ValueError(f"{path}, line {number}: {size}; expected {expected}")
            yield number, line


def bounded_text(path: str | Path, expected: str, errors: str = "strict") -> str:
    """Return the text of the file at ``path``, as :func:`read_bounded` reads it.

    ``errors``: as of ``bytes.decode``. ValueError: too long, a pipe, or (strict) no UTF-8.
    """
    data = read_bounded(path, MOST_TEXT_BYTES, expected)
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"is no text ({error.reason} at byte {error.start})") from error


def replace_file(path: str | Path, data: str | bytes, durable: bool = False) -> None:
    """Write ``data`` to ``path`` so that a reader finds what stood there, or all of ``data``.

    It is written to a new file next to ``path``, of a name that nobody can foretell, which then
    takes the place of what stands at ``path``: no link there is followed and no pipe opened.
    ``durable``: it survives a power failure, too. OSError: nothing has changed.
    """
    target = Path(path)
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(file, "wb") as opened:
            if target.is_file() and not target.is_symlink():
                os.fchmod(opened.fileno(), target.stat().st_mode & 0o777)
            opened.write(data.encode() if isinstance(data, str) else data)
            if durable:
                opened.flush()
                os.fsync(opened.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> int:
    """Return a descriptor of the plain file at ``path`` to read and append to, made if absent.

    OSError: a link, a pipe or a device lies there, or it cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(None, "is no plain file")
    return file
