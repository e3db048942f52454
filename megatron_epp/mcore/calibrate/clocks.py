"""Clocks of a probe: for the device's computing time of an op, and the host's issue time.

With few tokens, an op takes as long as the host needs to issue its kernels. With many tokens, it
takes as long as the device computes. A straight line fitted to both cases underestimates large
chunks, by half for a layer of 2048 columns on an H100. So each time is measured by its own clock.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_epp.runtime.clock import CudaClock

# Seconds that a device spins before the timed ops, while its host issues their kernels. The host
# needs up to 5 ms to issue a layer's backward with recompute.
_HEAD_START = 8e-3
_CYCLES_PER_SECOND = 2e9  # upper bound of a multiprocessor's clock rate


class Clock(Protocol):
    """Clock with which a probe times forward and backward."""

    def start(self) -> Any:
        """Start timing, after all earlier work is done."""

    def seconds(self, start: Any) -> float:
        """Return the seconds since ``start``."""


class WallClock:
    """Clock that reads ``now``, which waits for all earlier work; :meth:`start` calls ``before``.

    ``now`` is :meth:`.probe.Probe.now`. On a GPU, the clock therefore measures the time from the
    issue of the first kernel to the end of the last kernel.
    """

    def __init__(self, now: Callable[[], float], before: Callable[[], Any] = lambda: None):
        """Create a clock that reads ``now``."""
        self._now, self._before = now, before

    def start(self) -> float:
        """Start timing, after ``before``."""
        self._before()
        return self._now()

    def seconds(self, start: float) -> float:
        """Wait for all work, and return the seconds since ``start``."""
        return self._now() - start


class IssueClock(WallClock):
    """Clock of the time until the host's calls return, on an idle device.

    A call that synchronises with the device, such as ``Tensor.item``, includes the wait.
    """

    def start(self) -> float:
        """Start timing, after the device has finished all earlier work."""
        self._now()
        return time.perf_counter()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, without waiting for the device."""
        return time.perf_counter() - start


class DeviceClock:
    """Clock of the current CUDA device's work, which the host issues ahead of time."""

    def __init__(self, now: Callable[[], float]):
        """Create a clock; ``now`` waits for the device."""
        self._now = now

    def start(self) -> CudaClock:
        """Let the device spin, and start timing after the spinning."""
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
