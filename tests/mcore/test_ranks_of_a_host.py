"""Ranks that share a host: one network device each, and company while others are measured."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.runtime.world import run

GROUPS = 8
WAITING = timedelta(seconds=50)


def threads_of_groups() -> tuple[int, timedelta]:
    """Threads that came with as many groups; the timeout of one of them, over which ranks speak."""
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0, 1], timeout=WAITING) for _ in range(GROUPS)]
    for group in groups:
        sent = torch.ones(1)
        dist.all_reduce(sent, group=group)
        assert sent.item() == 2
    backend = groups[-1]._get_backend(torch.device("cpu"))
    return len(os.listdir("/proc/self/task")) - before, backend.options._timeout


def share(rank: int) -> dict[str, Any]:
    from megatron_epp.mcore.patching.gloo_device import share_gloo_device

    plain, _ = threads_of_groups()
    share_gloo_device()
    threads_of_groups()  # the first of them makes the device
    shared, timeout = threads_of_groups()
    return {"plain": plain, "shared": shared, "timeout": timeout}


def test_groups_share_one_device_and_its_thread(tmp_path) -> None:
    for found in run(2, share, tmp_path):
        assert isinstance(found, dict), found
        assert found["plain"] - found["shared"] == GROUPS
        assert found["timeout"] == WAITING


def wait_for_the_other(rank: int) -> dict[bool, int]:
    """Layers that rank 0 runs until rank 1 has come, alone or with what others would wait for."""
    from megatron_epp.mcore.patching.cpu_host import install_cpu_host

    install_cpu_host()
    from megatron_epp.mcore.calibrate.measure import _meet

    found = {}
    for alone in (True, False):
        runs: list[Any] = []
        probe: Any = SimpleNamespace(
            computes_alone=alone, layers=lambda *what, runs=runs: runs.append(what)
        )
        groups: Any = SimpleNamespace(control=dist.group.WORLD)
        if rank == 1:
            time.sleep(0.5)
        began = time.monotonic()
        _meet(probe, groups)
        found[alone] = len(runs)
        if rank == 0:
            assert time.monotonic() - began > 0.2
    return found


def test_whoever_waits_while_others_are_measured_computes(tmp_path) -> None:
    first, _ = run(2, wait_for_the_other, tmp_path, seconds=240)
    assert isinstance(first, dict), first
    assert first[True] > 0
    assert first[False] == 0
