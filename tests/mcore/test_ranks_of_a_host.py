"""Ranks that share a host: one network device each, and company while others are measured."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.world import run
from tests.waiting import LAST_RESORT_SECONDS, until

GROUPS = 8
WAITING = timedelta(seconds=LAST_RESORT_SECONDS)


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
    from megatron_epp.mcore.patching.gloo import share_gloo_device

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


def wait_for_the_other(rank: int, folder: Path) -> int:
    """Layers that rank 0 runs until rank 1 has come, which comes when it has run one."""
    from megatron_epp.mcore.patching.cpu_host import install_cpu_host

    install_cpu_host()
    from megatron_epp.mcore.calibrate.measure import _meet

    runs: list[Any] = []

    def layers(*what: Any) -> None:
        runs.append(what)
        (folder / "ran").touch()

    probe: Any = SimpleNamespace(computes_alone=True, layers=layers)
    groups: Any = SimpleNamespace(control=dist.group.WORLD)
    if rank == 1:
        until((folder / "ran").exists)
    _meet(probe, groups)
    return len(runs)


@pytest.mark.everything
def test_whoever_waits_while_others_are_measured_computes(tmp_path) -> None:
    first, _ = run(2, wait_for_the_other, tmp_path, tmp_path)
    assert isinstance(first, int) and first > 0, first


@pytest.mark.parametrize(("alone", "layers"), [(True, 3), (False, 0)])
def test_what_others_would_wait_for_is_not_run_meanwhile(monkeypatch, alone, layers) -> None:
    """Whether the others have come is asked before every layer, and not at all with company."""
    pytest.importorskip("megatron.core")
    from megatron_epp.mcore.calibrate import measure

    come, runs = iter((False, False, False, True)), []
    met = SimpleNamespace(is_completed=lambda: next(come), wait=lambda: runs.append("met"))
    monkeypatch.setattr(measure.dist, "barrier", lambda group, async_op: met)
    probe: Any = SimpleNamespace(computes_alone=alone, layers=lambda *_: runs.append("layer"))
    measure._meet(probe, SimpleNamespace(control=None))
    assert runs == ["layer"] * layers + ["met"]
