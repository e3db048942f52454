"""When ops start and stop, without making the host wait for the device."""

import time

import torch


class HostClock:
    """Wall-clock seconds since the iteration began, for work that is done when a call returns."""

    def start(self):
        self._began = time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter() - self._began

    def wait(self, mark: float) -> None:
        """Until the device has passed ``mark``, as the host has."""

    def seconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """CUDA events on the current stream; seconds are read once, when the iteration is over."""

    def start(self):
        self._began = self.mark()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Until the device has passed ``mark``."""
        mark.synchronize()

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._began.elapsed_time(mark) / 1e3
