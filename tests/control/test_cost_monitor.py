"""What a measured op says of the cost model's figures, and when refits are made and adopted."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_epp.control import cost_monitor
from megatron_epp.control.cost_monitor import PAUSE, CostMonitor
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import WindowPairs
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.refit import LEAST
from megatron_epp.cost.fitting.residuals import Residual
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Kind, Op, Plan, Timed
from tests.runtime.world import run

PLAN = Plan.parse(
    "plan v1\ndocuments 40 20\nlayers 4\nchunk 0: 0[0:40]\nchunk 1: 1[0:20]\n"
    "recompute 0: 1o1f1n1k 4o\nstage 0: F0 F1 B1 B0\n"
)


PROFILE = analytic_profile(Model("m", 4, 64, 176, 4, 2, 16, 1000), DEVICES["cpu"])
COST = Cost(StageLayout(PROFILE, (4,)), (1e9,))


def test_an_offloaded_layer_computes_what_a_kept_one_does() -> None:
    """The fit knows no letter ``o``: such a sample would end the job."""
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    fields = dict.fromkeys(Residual.__dataclass_fields__, 0)
    for chunk, choice, tokens in ((0, "kfnk", 40), (1, "kkkk", 20)):
        one = Residual(
            **{**fields, "kind": Kind.BACKWARD, "chunk": chunk, "tokens": tokens, "measured": 2.0}
        )
        sample = monitor._sample(COST, PLAN, one)
        assert sample.choice == choice and sample.value == 2.0


def test_a_sample_says_of_which_kinds_the_layers_are() -> None:
    kinds = {"near": LayerShape(window=16), "far": LayerShape()}
    model = Model("m", 4, 64, 176, 4, 2, 16, 1000, kinds=kinds, pattern="near far 2*near")
    profile = analytic_profile(model, DEVICES["cpu"])
    cost = Cost(StageLayout(profile, (1, 3), layer_kinds=model.layer_kinds), (1e9,) * 2)
    plan = Plan.parse(
        "plan v1\ndocuments 40\nlayers 1 3\nchunk 0: 0[0:30]\nchunk 1: 0[30:40]\n"
        "recompute 0: 1k 1k\nrecompute 1: 1f2k 3k\nstage 0: F0 F1 B1 B0\nstage 1: F0 F1 B1 B0\n"
    )
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    one = Residual(1, Kind.BACKWARD, 1, 10, 30, 1.0, 2.0)
    sample = monitor._sample(cost, plan, one)
    assert sample.kinds == ("far", "near", "near")
    assert sample.columns == ((WindowPairs(16), 10 * 16),)
    assert sample.pairs == sum(range(31, 41))


def test_a_sample_of_a_slower_rank_is_what_the_fastest_would_have_taken() -> None:
    profile = replace(COST.layout.profile, rank_slowness=(1.0, 2.5))
    plan = Plan.parse(
        "plan v1\ndocuments 40\nlayers 1 3\nchunk 0: 0[0:40]\nstage 0: F0 B0\nstage 1: F0 B0\n"
    )
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    one = Residual(1, Kind.BACKWARD, 0, 40, 0, 1.0, 5.0)
    sample = monitor._sample(Cost(StageLayout(profile, (1, 3)), (1e9,) * 2), plan, one)
    assert sample.value == 2.0 and sample.last


def test_in_lockstep_an_op_says_what_the_slowest_replica_did() -> None:
    """Its chunk is what took that long, whichever replica's rank measured it."""
    text = "plan v1\nreplica {} of 2\ndocuments {}\nlayers 32\n{}stage 0: F0 F1 B1 B0\n"
    long = Plan.parse(text.format(0, "4000 20", "chunk 0: 0[0:4000]\nchunk 1: 1[0:20]\n"))
    short = Plan.parse(text.format(1, "30", "chunk 0: -\nchunk 1: 0[0:30]\n"))
    cost = named_cost("gpt-7b", "a100-80g", pp=1, cp=8, zero=3)
    cost = cost.with_coefficients_times({"host_seconds": 0.0})  # who waits for it, learns nothing
    records = [Timed(0, op, float(at), at + 0.5) for at, op in enumerate(long.orders[0])]
    predicted = []
    for mine in (long, short):
        monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
        predicted.append(monitor.busy(cost, mine, records, (long, short)))
        assert [sample.tokens for _, sample in monitor._samples] == [4000, 30, 30, 4000]
        assert [kind for kind, _ in monitor._samples] == [op.kind for op in long.orders[0]]
    assert predicted[0] == predicted[1]
    alone = CostMonitor(SimpleNamespace(), [], may_refit=True)
    assert alone.busy(cost, short, records) < predicted[0]
    assert alone.busy(cost, long, records) == pytest.approx(predicted[0], rel=0.01)
    assert Op(Kind.FORWARD, 0) == records[0].op


def test_ops_that_wait_for_their_host_say_nothing_of_the_device() -> None:
    """By such a chunk a token of a large one would take too little."""
    plan = Plan.parse(
        "plan v1\ndocuments 40000 2000 500\nlayers 32\nchunk 0: 0[0:40000]\n"
        "chunk 1: 1[0:2000]\nchunk 2: 2[0:500]\nstage 0: F0 F1 F2 B2 B1 B0\n"
    )
    cost = named_cost("llama3-8b", "h100-80g", pp=1, dp=8, zero=3)
    records = [Timed(0, op, float(at), at + 0.5) for at, op in enumerate(plan.orders[0])]
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    monitor.busy(cost, plan, records)
    learnt = [(kind.value, sample.tokens) for kind, sample in monitor._samples]
    assert learnt == [("F", 40000), ("B", 2000), ("B", 40000)]


# ------------------------------------------------------------------ other pipelines


def test_refits_of_a_resumed_run_are_made_fit_for_this_pipeline(tmp_path: Path) -> None:
    slow = replace(COST.layout.profile, rank_slowness=(1.0, 2.0))
    groups = SimpleNamespace(control=SimpleNamespace(rank=lambda: 0))
    seen = CostMonitor(groups, [], True, lambda each: each.without_slowness)
    seen._kept = lambda folder: {16: slow.to_json(), 27: slow.to_json()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_monitor, "broadcast_result", lambda text, group: text())
        assert seen.resume(str(tmp_path), 20) == COST.layout.profile


# ------------------------------------------------------------------ refits on two ranks


def monitor_of(rank: int, *folders: str) -> CostMonitor:
    """A monitor whose drift has raised the alarm."""
    groups = SimpleNamespace(control=dist.new_group(), leads=rank == 0)
    monitor = CostMonitor(groups, list(folders), may_refit=True)
    monitor.drift.alarmed = True
    return monitor


def attempts(rank: int, ops: list[int]) -> list[int]:
    """When the monitor has last tried to refit, after iterations 8, 9, ... with as many ``ops``."""
    monitor, tried = monitor_of(rank), []
    for iteration, count in enumerate(ops, 8):
        sample = Sample("kkkk", True, True, 40, 820, 0, 1.0)
        monitor._samples.extend([(Kind.FORWARD, sample)] * (count - len(monitor._samples)))
        monitor.refit(iteration, COST)
        tried.append(monitor._tried)
    return tried


def test_too_few_ops_are_no_attempt(tmp_path) -> None:
    """The next one would be 20 iterations later."""
    found = run(2, attempts, tmp_path, [36, LEAST - 1, LEAST, LEAST + 4])
    assert found == [[-PAUSE, -PAUSE, 10, 10]] * 2


def replay(rank: int, before: str, now: str, iteration: int) -> list[float | None]:
    monitor = monitor_of(rank, now)
    adopted = [monitor.resume(before, iteration)]
    for passed in range(iteration, 8):
        monitor.drift.alarmed = True
        adopted.append(monitor.refit(passed, None))
        if monitor._recorded == {}:
            break
    return [one and one.link_latency_seconds for one in adopted]


def test_a_resumed_run_adopts_each_refit_at_its_own_iteration(tmp_path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    refits = {3: PROFILE, 7: replace(PROFILE, link_latency_seconds=0.5)}
    for iteration, profile in refits.items():
        profile.save(str(before / f"epp-cost-model.from-{iteration:06d}.json"))
    # Resumed where iteration 5 is the next: what is refitted after 6 counts from 7 on. The drift's
    # alarm is on all the time, and nothing is learnt anew before the recorded ones are through.
    found = run(2, replay, tmp_path, str(before), str(now), 5)
    assert found == [[PROFILE.link_latency_seconds, None, 0.5]] * 2
    for iteration, profile in refits.items():
        assert Profile.load(str(now / f"epp-cost-model.from-{iteration:06d}.json")) == profile
