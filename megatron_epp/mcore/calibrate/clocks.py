"""Clocks of a probe: the time a device computes an op, or the time its host needs to issue it.

An op of few tokens takes as long as its host needs to issue its kernels. One of many tokens takes
as long as the device computes. A straight line through both underestimates large chunks: on an
H100, for a layer of 2048 columns, by half. So both are measured, each by its own clock.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_epp.runtime.clock import CudaClock

# Seconds that a device spins before a timed part, while its host issues kernels. A layer's backward
# with recompute takes a host up to 5 ms.
_HEAD_START = 8e-3
_CYCLES_PER_SECOND = 2e9  # upper bound of a multiprocessor's clock rate


class Clock(Protocol):
    """Clock with which a probe times the parts of a pass."""

    def start(self) -> Any:
        """Start timing, after all earlier work is done."""

    def seconds(self, start: Any) -> float:
        """Return the seconds since ``start``."""


class WallClock:
    """Clock that reads ``now``, which waits for all earlier work; ``before`` runs first.

    ``now`` is that of :class:`Probe`: on a GPU, from the issue of the first kernel to the end of
    the last.
    """

    def __init__(self, now: Callable[[], float], before: Callable[[], Any] = lambda: None):
        """Make a clock of ``now``."""
        self._now, self._before = now, before

    def start(self) -> float:
        """Start timing, after ``before``."""
        self._before()
        return self._now()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, when all work is done."""
        return self._now() - start


class IssueClock(WallClock):
    """Clock of the time until the host's calls return, on an idle device.

    A call that synchronises with the device, such as reading a number of it, includes that wait.
    """

    def start(self) -> float:
        """Start timing, after the device has finished all earlier work."""
        self._now()
        return time.perf_counter()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, whatever the device still computes."""
        return time.perf_counter() - start


class DeviceClock:
    """Clock of the current CUDA device's work, with its host running ahead."""

    def __init__(self, now: Callable[[], float]):
        """Make a clock; ``now`` waits for the device."""
        self._now = now

    def start(self) -> CudaClock:
        """Start timing the work after the device's spinning."""
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
