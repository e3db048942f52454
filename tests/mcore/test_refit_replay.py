"""A resumed run adopts the refits of the run before it, each at its own iteration."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from megatron_epp.control.cost_monitor import PAUSE
from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.fitting.refit import LEAST
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Kind
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


def attempts(rank: int, ops: list[int]) -> list[int]:
    """When the monitor has last tried to refit, after iterations 8, 9, ... with as many ``ops``."""
    import torch.distributed as dist

    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.control.cost_monitor import CostMonitor
    from megatron_epp.cost.cost import Cost
    from megatron_epp.cost.fitting.fit import Sample
    from megatron_epp.cost.layout import StageLayout

    cost = Cost(StageLayout(FIRST, (4,)), (1e9,))
    monitor = CostMonitor(SimpleNamespace(control=dist.new_group(), leads=rank == 0), [], True)
    monitor.drift.alarmed, tried = True, []
    for iteration, count in enumerate(ops, 8):
        sample = Sample("kkkk", True, True, 40, 820, 0, 1.0)
        monitor._samples.extend([(Kind.FORWARD, sample)] * (count - len(monitor._samples)))
        monitor.refit(iteration, cost)
        tried.append(monitor._tried)
    return tried


def test_too_few_ops_are_no_attempt(tmp_path) -> None:
    """The next one would be 20 iterations later."""
    found = run(2, attempts, tmp_path, [36, LEAST - 1, LEAST, LEAST + 4])
    assert found == [[-PAUSE, -PAUSE, 10, 10]] * 2


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
