"""Scripts for GPUs run, on a host without one, up to where they need it; and what two ranks ask of
each other ends."""

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_epp.mcore.patching import cuda_host
from tests.device.fakes import Group, run_on
from tests.device.queues import HERE, ORDERS, Order, World

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
ROWS = 8


class Reached(Exception):
    """CUDA is asked for something."""


def no_cuda(*arguments: Any, **named: Any) -> None:
    raise Reached


@pytest.mark.skipif(torch.cuda.is_available(), reason="gpu_day.sh runs them")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("held_sms.py", ["--measure"]),
        ("queues.py", ["receives"]),
        ("queues.py", ["host"]),
        ("waiting_receive.py", []),
        ("host.py", []),
        ("heads.py", []),
    ],
)
def test_up_to_the_first_call_of_cuda(script: str, words: list[str], monkeypatch) -> None:
    for name in ("ones", "zeros", "randn"):
        monkeypatch.setattr(torch, name, no_cuda)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in (*cuda_host.DEFAULTS, cuda_host.ALLOCATOR[0]):  # which some of them set
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "set_device", no_cuda)
    monkeypatch.setattr(torch.cuda, "Stream", no_cuda)
    with pytest.raises(Reached):
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")


def test_first_calls_finds_no_kernel_and_says_why() -> None:
    """Its configuration has whatever is looked at before a kernel is tried on the device."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "first_calls.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    te, by_torch = done.stdout.splitlines()
    assert te.startswith("te: --epp-attention te: no attention can be used on this device")
    assert by_torch.startswith("torch: --epp-attention torch: no attention can be used")
    assert "attribute" not in done.stdout


@pytest.mark.parametrize("order", ORDERS[:3], ids=lambda order: order.name)
def test_two_ranks_get_through_waiting_receive(order: Order, monkeypatch, capsys) -> None:
    """Where the first message of a group waits for the other end of it. (A receive posted first
    stands for ever: its sender stands at the barrier.)"""
    script = runpy.run_path(str(SCRIPTS / "waiting_receive.py"))
    main: Callable[[], None] = script["main"]
    main.__globals__.update(PRODUCTS=2, ROUNDS=1, MOST_BLOCKS=(None, 4))
    words = ["--size", str(ROWS), "--elements", str(ROWS)]
    monkeypatch.setattr(sys, "argv", ["waiting_receive.py", *words])
    monkeypatch.delenv("EPP_TE_ON_CPU", raising=False)
    made = 0

    def new_group(ranks: Any = None, backend: str = "", pg_options: Any = None) -> Group:
        nonlocal made
        made += 1
        # Every rank makes them in one order: half of them each.
        return Group(f"{backend} {asked[HERE.host.rank].pop(0)}", (0, 1), backend, lazy=True)

    asked = {rank: [0, 1, 2] for rank in (0, 1)}
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: None)
    monkeypatch.setattr(dist, "get_rank", lambda: HERE.host.rank)
    monkeypatch.setattr(dist, "new_group", new_group)
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", lambda free: None)
    run_on(World(2, order, 0), lambda rank: main())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * 2 and made == 6
    assert lines[-1].startswith("max_ctas 4, 8 SMs left free, 2 receives wait: products take ")
