"""Clock and heap that a rank's executor runs with, by the device that it computes on."""

import torch

from megatron_epp.runtime.clock import CudaClock, HostClock
from megatron_epp.runtime.malloc_trim import HostHeap

Instruments = tuple[HostClock | CudaClock, HostHeap | None]


def instruments_for(device: torch.device) -> Instruments:
    """The clock, not started, and the heap to trim between ops; None on a GPU."""
    return (CudaClock(), None) if device.type == "cuda" else (HostClock(), HostHeap())
