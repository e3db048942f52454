"""Clocks that time ops without making the host wait for the device."""

import time

import torch


class HostClock:
    """Wall clock for CPU ops, which are complete when their call returns."""

    def start(self):
        """Set the current time as the start of an iteration."""
        self._began = time.perf_counter()

    def mark(self) -> float:
        """Return the seconds since ``start``."""
        return time.perf_counter() - self._began

    def wait(self, mark: float) -> None:
        """Return immediately, because ``mark`` is a time in the past."""

    def seconds(self, mark: float) -> float:
        """Return the seconds from ``start`` to ``mark``."""
        return mark


class CudaClock:
    """Clock that records CUDA events on the current stream and reads them after the iteration."""

    def start(self):
        """Record the event from which seconds count."""
        self._began = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Return an event recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Block the host until the device has passed ``mark``."""
        mark.synchronize()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return the seconds from ``start`` to ``mark``; block until the device has passed it."""
        mark.synchronize()
        return self._began.elapsed_time(mark) / 1e3
