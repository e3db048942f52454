"""Functions that read files with a size limit, and replace files atomically."""

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_TEXT_BYTES = 16 << 20  # limit of texts that people and jobs write, far above any real text


def read_bounded(path: str | Path, most_bytes: int, expected: str) -> bytes:
    """Return the bytes of the file at ``path``.

    A named pipe is refused, because opening it blocks until another process writes. The anonymous
    pipe of a shell's ``<(command)`` is read. ``expected`` describes the expected contents, for
    error messages.

    Raises:
        ValueError: if the file is longer than ``most_bytes`` (such as an endless device), or is a
            named pipe.
        OSError: if the file cannot be read.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode) and os.path.exists(os.path.realpath(path)):
        raise ValueError(f"is a pipe; expected {expected} in a regular file")
    with open(path, "rb") as file:
        return read_at_most(file, most_bytes, expected)


def read_at_most(file: BinaryIO, most_bytes: int, expected: str) -> bytes:
    """Return the rest of ``file``; raise a ValueError if it is longer than ``most_bytes``."""
    data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes >> 20} MiB; expected {expected}")
    return data


def bounded_lines(path: str | Path, expected: str) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of every line of a file; the file may have any length.

    Raises:
        ValueError: if a line is longer than ``MOST_TEXT_BYTES``; the message contains ``expected``.
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_TEXT_BYTES + 1), b""), 1):
            if len(line) > MOST_TEXT_BYTES:
                size = f"longer than {MOST_TEXT_BYTES >> 20} MiB"
                raise ValueError(f"{path}, line {number}: {size}; expected {expected}")
            yield number, line


def bounded_text(path: str | Path, expected: str, errors: str = "strict") -> str:
    """Return the text of the file at ``path``, as :func:`read_bounded` reads it.

    Args:
        path: path of the file.
        expected: description of the expected contents, for error messages.
        errors: error handling of ``bytes.decode``.

    Raises:
        ValueError: if the file is longer than ``MOST_TEXT_BYTES``, is a named pipe, or (with
            "strict") is not UTF-8.
        OSError: if the file cannot be read.
    """
    data = read_bounded(path, MOST_TEXT_BYTES, expected)
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text ({error.reason} at byte {error.start})") from error


def replace_file(path: str | Path, data: str | bytes, durable: bool = False) -> None:
    """Replace the content of ``path`` atomically by ``data``.

    The data is written to a new file with a random name in the same folder, which is then renamed.
    Links and pipes at ``path`` are replaced, not followed or opened.

    Args:
        path: path of the file.
        data: new content of the file.
        durable: whether to sync the data to the disk, to survive a power failure.

    Raises:
        OSError: if the file cannot be replaced; ``path`` is then unchanged.
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
    """Return a descriptor of the regular file at ``path``, to read and append; create it if absent.

    Raises:
        OSError: if ``path`` is a link, a pipe or a device, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(None, "is not a regular file")
    return file
