"""Measurement of the rate of copies to and from host memory, while all ranks copy."""

from statistics import median

import torch
import torch.distributed as dist

from megatron_epp.mcore.calibrate.probe import Probe
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.host_store import HostStore

# More than caches hold; on a GPU, enough to hide the launch overhead of a copy.
CPU_BYTES, GPU_BYTES = 2**24, 2**28
COPIES = 5


def host_rate(probe: Probe, groups: Groups) -> float:
    """Return the bytes per second that this rank copies in one direction, to or from host memory.

    All ranks of the job must call this function.

    On a GPU, copies run in both directions at the same time. The function allocates host memory
    once, as offloading does, and does not time the allocation.
    """
    on_gpu = probe.device.type == "cuda"
    nbytes = GPU_BYTES if on_gpu else CPU_BYTES
    host = HostStore(probe.device)
    ends = [_ends(host, nbytes) for _ in range(2)]
    seconds = []
    for _ in range(COPIES + 1):  # the first copy is not counted: it maps the memory
        dist.barrier(groups.control)
        began = probe.now()
        done = (
            host.copies.out([(there, here) for there, here in ends[0]]),
            host.copies.back([(here, there) for there, here in ends[1]]),
        )
        for one in done:
            host.copies.wait(one)
        seconds.append(probe.now() - began)
    at_once = 1 if on_gpu else 2  # a CPU copies one direction after the other
    return at_once * nbytes / median(seconds[1:])


def _ends(host: HostStore, nbytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs (host block, device block) of equal size; the host blocks sum to ``nbytes``."""
    blocks = host.allocate(nbytes)
    assert blocks is not None, "no pinned memory to measure copies with"
    here = torch.zeros(nbytes, dtype=torch.uint8, device=host.device)
    return list(zip(blocks, here.split([block.numel() for block in blocks]), strict=True))
