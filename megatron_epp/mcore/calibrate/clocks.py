"""Clocks that measure a probe's ops: the device's computing time and the host's issue time.

With few tokens, the host's time to issue the kernels determines the time of an op. With many
tokens, the device's computing time determines it. A straight line fitted to both cases
underestimates large chunks, by half for a layer of hidden size 2048 on an H100. So two clocks
measure the two times separately.
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
    """Clock of the elapsed time until the device has completed all work.

    ``now`` is :meth:`.probe.Probe.now`, which waits for all earlier work. On a GPU, the clock
    therefore measures the time from the issue of the first kernel to the end of the last kernel.
    """

    def __init__(self, now: Callable[[], float], before: Callable[[], Any] = lambda: None):
        """Create a clock that reads ``now``; :meth:`start` calls ``before`` first."""
        self._now, self._before = now, before

    def start(self) -> float:
        """Call ``before``, wait for all earlier work, and return the start time."""
        self._before()
        return self._now()

    def seconds(self, start: float) -> float:
        """Wait for all work, and return the seconds since ``start``."""
        return self._now() - start


class IssueClock(WallClock):
    """Clock of the time until the host's calls return; the device is idle when the clock starts.

    For a call that synchronises with the device, such as ``Tensor.item``, the time includes the
    wait for the device.
    """

    def start(self) -> float:
        """Start timing, after the device has finished all earlier work."""
        self._now()
        return time.perf_counter()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, without waiting for the device."""
        return time.perf_counter() - start


class DeviceClock:
    """Clock of the CUDA device's computing time, without the host's time to issue kernels."""

    def __init__(self, now: Callable[[], float]):
        """Create a clock; ``now`` is a function that waits for the device."""
        self._now = now

    def start(self) -> CudaClock:
        """Start timing after a few milliseconds of idle spinning on the device.

        During the spinning, the host issues the kernels to time.
        """
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
