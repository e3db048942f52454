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

# Seconds that a device works or spins before the timed ops, while its host issues their kernels.
# The host needs up to 5 ms to issue a layer's backward with recompute.
_HEAD_START = 8e-3
_CYCLES_PER_SECOND = 2e9  # upper bound of a multiprocessor's clock rate


class Clock(Protocol):
    """Clock with which a probe times forward and backward."""

    def start(self, rested: bool = True) -> Any:
        """Wait for all earlier work, start timing, and return the start.

        ``rested`` tells whether the device may have been idle. It is False right after another
        timed op.
        """

    def seconds(self, start: Any) -> float:
        """Return the seconds since ``start``."""


class WallClock:
    """Clock of the time until the device has completed all work.

    ``now`` is :meth:`.probe.Probe.now`, which waits for all earlier work. On a GPU, the clock
    therefore measures the time from the issue of the first kernel to the end of the last kernel.
    """

    def __init__(self, now: Callable[[], float], before: Callable[[], Any] = lambda: None):
        """Create a clock that reads ``now``; :meth:`start` calls ``before`` first."""
        self._now, self._before = now, before

    def start(self, rested: bool = True) -> float:
        """Call ``before``, wait for all earlier work, and return the start time."""
        self._before()
        return self._now()

    def seconds(self, start: float) -> float:
        """Wait for all work, and return the seconds since ``start``."""
        return self._now() - start


class NoClock:
    """Clock that neither waits nor measures: all seconds are 0."""

    def start(self, rested: bool = True) -> None:
        """Do nothing."""

    def seconds(self, start: None) -> float:
        """Return 0."""
        return 0.0


class IssueClock(WallClock):
    """Clock of the host's issue time: it stops when the host's calls return.

    The device is idle when the clock starts.

    For a call that synchronises with the device, such as ``Tensor.item``, the time includes the
    wait for the device.
    """

    def start(self, rested: bool = True) -> float:
        """Wait for all earlier work, and return the start time."""
        self._now()
        return time.perf_counter()

    def seconds(self, start: float) -> float:
        """Return the seconds since ``start``, without waiting for the device."""
        return time.perf_counter() - start


class DeviceClock:
    """Clock of the CUDA device's computing time, without the host's time to issue kernels.

    A device at its power limit lowers its clock rate within about 10 ms of work, and raises it
    again within 20 ms of idling. A layer on an idle H200 takes 12 to 17% less time than in
    training. With ``work``, the device therefore works before the timed ops.
    """

    def __init__(
        self, now: Callable[[], float], work: Callable[[], Any] | None = None, repeats: int = 1
    ):
        """Create a clock.

        Args:
            now: Function that waits for the device.
            work: Function that issues work for the device, to run before timed ops. None: the
                device spins for some milliseconds instead.
            repeats: Number of times that the work runs if the device may have rested. Work may
                exchange data with other ranks, which need the same number.
        """
        self._now, self._work, self._repeats = now, work, repeats
        self._spin = _HEAD_START if work is None else max(0.0, _HEAD_START - self._lead(work))

    def _lead(self, work: Callable[[], Any]) -> float:
        """Return the seconds that the device still works after its host has issued ``work``."""
        work()  # one-time costs
        self._now()
        work()
        issued = time.perf_counter()
        self._now()
        return time.perf_counter() - issued

    def start(self, rested: bool = True) -> CudaClock:
        """Give the device some milliseconds of work, then start and return a clock.

        While the device works, the host can issue the kernels to time. If the device may have been
        idle (``rested``), ``work`` runs ``repeats`` times, otherwise once.
        """
        self._now()
        for _ in range(self._repeats if rested else 1):
            if self._work is not None:
                self._work()
        torch.cuda._sleep(int(self._spin * _CYCLES_PER_SECOND))
        events = CudaClock()
        events.start()
        return events

    def seconds(self, start: CudaClock) -> float:
        """Return the device's seconds since ``start``."""
        stop = start.mark()
        self._now()
        return start.seconds(stop)
