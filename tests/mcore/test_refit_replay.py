"""A resumed run adopts the refits of the run before it, each at its own iteration."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.profile import Profile
from tests.runtime.world import run

FIRST = profile(Model("m", 4, 32, 64, 4, 2, 8, 128), DEVICES["cpu"])
SECOND = dataclasses.replace(FIRST, link_latency_seconds=0.5)


def replay(rank: int, before: str, now: str, iteration: int) -> list[Any]:
    import torch.distributed as dist

    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.control.cost_monitor import CostMonitor

    groups = SimpleNamespace(control=dist.new_group(), leads=rank == 0)
    monitor = CostMonitor(groups, [now], may_refit=True)
    adopted = [monitor.resume(before, iteration)]
    for passed in range(iteration, 8):
        monitor.drift.alarmed = True
        adopted.append(monitor.refit(passed, None))
        if monitor._recorded == {}:
            break
    return [one and one.link_latency_seconds for one in adopted]


def test_refits_come_at_their_iterations(tmp_path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    FIRST.save(str(before / "epp-cost-model.from-000003.json"))
    SECOND.save(str(before / "epp-cost-model.from-000007.json"))
    started = FIRST.link_latency_seconds
    # Resumed where iteration 5 is the next: what is refitted after 6 counts from 7 on. The drift's
    # alarm is on all the time, and nothing is learnt anew before the recorded ones are through.
    found = run(2, replay, tmp_path, str(before), str(now), 5)
    assert found == [[started, None, 0.5]] * 2
    assert Profile.load(str(now / "epp-cost-model.from-000007.json")) == SECOND
    assert Profile.load(str(now / "epp-cost-model.from-000003.json")) == FIRST
