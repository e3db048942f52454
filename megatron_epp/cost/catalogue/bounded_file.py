"""A file that a user names, read whole but never without end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def read_bounded(path: str | Path, most_bytes: int, expected: str) -> bytes:
    """The bytes of the file at ``path``.

    A ValueError where they are more than ``most_bytes``, as of a device without end, or where a
    pipe lies in the folder: opening it would wait for somebody to write. A shell's ``<(command)``
    is a pipe without a place in any folder, and is read. OSError: it cannot be read.
    """
    if stat.S_ISFIFO(os.stat(path).st_mode) and os.path.exists(os.path.realpath(path)):
        raise ValueError(f"is a pipe; expected {expected} in a regular file")
    with open(path, "rb") as file:
        return read_at_most(file, most_bytes, expected)


def read_at_most(file: BinaryIO, most_bytes: int, expected: str) -> bytes:
    """The rest of ``file``. ValueError: it is longer than ``most_bytes``."""
    data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes >> 20} MiB; expected {expected}")
    return data
