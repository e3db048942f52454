"""Clocks of a probe: how long a device works on an op, or how long its host takes to issue it.

An op of few tokens takes as long as its host needs to issue its kernels, one of many tokens as long
as the device computes. What a straight line through both says of large chunks is too little: on an
H100, of a layer of 2048 columns, by half. So both are measured, each by a clock of its own.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_epp.runtime.clock import CudaClock

# Seconds that a device spins before what is timed: in these its host issues kernels ahead of it.
# One layer's backward with recompute takes a host up to 5 ms.
_HEAD_START = 8e-3
_CYCLES_PER_SECOND = 2e9  # of a multiprocessor's clock, at most


class Clock(Protocol):
    """What a probe times the parts of a pass with."""

    def start(self) -> Any:
        """Begin to time what comes next; what was asked for before is done."""

    def seconds(self, start: Any) -> float:
        """Return the seconds since ``start``."""


class WallClock:
    """Seconds by ``now``, which returns when everything asked for is done; ``before`` runs first.

    ``now`` of :class:`Probe`: on a GPU from the first kernel's issue to the last one's end.
    """

    def __init__(self, now: Callable[[], float], before: Callable[[], Any] = lambda: None):
        """Make a clock of ``now``."""
        self._now, self._before = now, before

    def start(self) -> float:
        """Begin to time, after ``before``."""
        self._before()
        return self._now()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, when all is done."""
        return self._now() - start


class IssueClock(WallClock):
    """Seconds until the host's calls return, on a device that has nothing else to do.

    A call that waits for the device, as those do that read a number of it, takes that long.
    """

    def start(self) -> float:
        """Begin to time, when the device is through with all before."""
        self._now()
        return time.perf_counter()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, whatever the device still does."""
        return time.perf_counter() - start


class DeviceClock:
    """Seconds that the current CUDA device works, its host being ahead of it."""

    def __init__(self, now: Callable[[], float]):
        """Make a clock; ``now`` waits for the device."""
        self._now = now

    def start(self) -> CudaClock:
        """Begin to time what comes behind the device's spinning."""
        self._now()
        torch.cuda._sleep(int(_HEAD_START * _CYCLES_PER_SECOND))
        events = CudaClock()
        events.start()
        return events

    def seconds(self, start: CudaClock) -> float:
        """Return the device's seconds since ``start``."""
        stop = start.mark()
        self._now()
        return start.seconds(stop)
