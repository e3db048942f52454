"""The C library's heap of a host without a GPU, where chunks of ever other sizes leave holes.

glibc keeps tensors of up to 32 MiB in one heap, and a hole in it fits only what is smaller. What a
process holds of the host's memory so grows with the ops that it has run: to 13 GiB within three
iterations of 128 documents of up to 16K tokens, of which chunks held 3.4 GiB at the most.
"""

import ctypes
import os
from collections.abc import Callable

STEP_BYTES = 2**30


class HostHeap:
    """Gives the holes' pages back to the host, where they have become many.

    The heap is trimmed when ``step_bytes`` more are resident than after the last time. So between
    ops a process never has more than those beyond what was in use at once, and the price, 0.1 s and
    the faults of pages that are taken anew, comes once for so many bytes.
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
        self._floor = self._resident()

    def settle(self) -> bool:
        """Trim the heap where it is time to; whether it was. Takes 20 microseconds where not."""
        if self._trim is None or self._resident() < self._floor + self.step_bytes:
            return False
        self._trim()
        self._floor = self._resident()
        return True


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
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    return lambda: trim(0)
