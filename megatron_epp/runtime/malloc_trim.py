"""The C library's heap of a host without a GPU, where chunks of ever other sizes leave holes.

glibc keeps tensors in one heap, and a hole in it fits only what is smaller. What a process holds of
the host's memory so grows with the ops that it has run: to 13 GiB within three iterations of 128
documents of up to 16K tokens, of which chunks held 3.4 GiB at the most.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

STEP_BYTES = 2**30
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # malloc.h


class HostHeap:
    """Gives the holes' pages back to the host, where they have become many.

    The heap is trimmed when twice as much is resident, and ``step_bytes`` more, as was ever in use:
    between ops, as a trim finds it, and beside that in one op. So between ops a process never has
    more, and the price, 0.1 s and the faults of pages that are taken anew, comes rarely once the
    largest ops have run.
    """

    def __init__(
        self,
        step_bytes: int = STEP_BYTES,
        resident: Callable[[], int] | None = None,
        trim: Callable[[], object] | None = None,
    ):
        """``resident``: bytes of this process in memory. ``trim``: gives back what can be; by
        default glibc's, and nothing where the C library has none."""
        self.step_bytes = step_bytes
        self._resident = resident or _resident_bytes()
        self._trim = trim or _glibc_trim()
        self._most_between = self._before = self._resident()
        self._most_in_op = 0

    def begin(self) -> None:
        """Count what came since the last op as no op's."""
        self._before = self._resident()

    def settle(self) -> bool:
        """Behind an op: trim the heap where it is time to; whether it was. Takes 20 microseconds
        where not."""
        resident = self._resident()
        # All of what an op takes where the heap has no holes: at the latest behind a trim.
        self._most_in_op = max(self._most_in_op, resident - self._before)
        self._before = resident
        needed = self._most_between + self._most_in_op
        if self._trim is None or resident < needed + max(self.step_bytes, needed):
            return False
        self._trim()
        self._before = self._resident()
        self._most_between = max(self._most_between, self._before)
        return True


def keep_large_blocks() -> bool:
    """Have the C library keep in its heap the memory of large tensors, too; whether it does.

    Else it asks the kernel for every tensor above 32 MiB and for what it gave back of the heap's
    end, and the kernel clears page by page: with chunks of 32K tokens a fifth of the time, with
    small ones nothing, so that what a token costs would grow with its chunk.
    """
    setting = _of_libc("mallopt", ctypes.c_int, ctypes.c_int)
    return setting is not None and bool(setting(_MMAP_MAX, 0) and setting(_TRIM_THRESHOLD, -1))


def _resident_bytes() -> Callable[[], int]:
    """By the kernel's second number in statm; where there is none, nothing seems to grow."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        try:
            with open("/proc/self/statm", "rb") as statm:
                return int(statm.read().split()[1]) * page_bytes
        except OSError:
            return 0

    return resident


def _glibc_trim() -> Callable[[], object] | None:
    trim = _of_libc("malloc_trim", ctypes.c_size_t)
    return None if trim is None else lambda: trim(0)


def _of_libc(name: str, *arguments: Any) -> Callable[..., int] | None:
    """glibc's function of that name; None in another C library."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    function.argtypes, function.restype = list(arguments), ctypes.c_int
    return function
