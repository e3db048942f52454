"""What two ranks of a script for GPUs ask of each other ends.

That the scripts run to their ends: tests/te_reference/test_dry_run.py.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.fakes import Group, run_on
from tests.device.queues import HERE, ORDERS, Order, World

SCRIPTS = Path(__file__).parents[2] / "scripts" / "gpu"
ROWS = 8


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
