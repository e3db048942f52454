"""Programs get through one queue with sends that meet their receives; other orders stand still."""

import time
from datetime import timedelta
from random import Random

import torch
import torch.distributed as dist

from megatron_epp.ir import Kind, Payload, Plan, Program, lower_rank
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.runtime.clock import HostClock
from megatron_epp.runtime.executor import CurrentOp, Executor, LinkLost
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import NoMeter
from tests.plans import EXAMPLE, two_ahead
from tests.runtime.strict_links import StrictLinks
from tests.runtime.test_executor import WIDTH, Linear, expected
from tests.runtime.world import run

RANKS, PLANS = 4, 100


def random_plans(stages: int) -> list[Plan]:
    made = []
    for seed in range(PLANS):
        random = Random(seed)
        lengths = [random.randint(1, 20) for _ in range(random.randint(1, 4))]
        share = (0.0, 0.5, 1.0)[seed % 3]
        made.append(arbitrary_plan(lengths, (1,) * stages, random, split_backward=share))
    return made


def make_groups(timeout: timedelta) -> dict[Payload, dist.ProcessGroup]:
    return {payload: dist.new_group(timeout=timeout) for payload in Payload}


def execute(
    plan: Plan, program: Program, stage: int, groups: dict, ranks: tuple[int, ...]
) -> tuple[torch.Tensor, int]:
    """The stage's gradient, and how many messages it took part in."""
    compute, clock = Linear(plan, stage), HostClock()
    clock.start()
    shape = lambda message: (plan.chunks[message.chunk].tokens, WIDTH)  # noqa: E731
    links = StrictLinks(groups, shape, torch.float64, torch.device("cpu"), ranks)
    Executor(program, compute, links, Store({}), clock, NoMeter(), CurrentOp(stage)).run()
    return compute.gradient, links.sent + links.received


def run_strictly(rank: int) -> tuple[int, float, str]:
    """100 plans on one pipeline of four ranks, 100 on two pipelines of two at once, and an order
    that hangs: (messages, largest error, how that one ended)."""
    groups = make_groups(timedelta(seconds=30))
    messages, error = 0, 0.0
    for ranks in ((0, 1, 2, 3), (2 * (rank // 2), 2 * (rank // 2) + 1)):
        stage = ranks.index(rank)
        for plan in random_plans(len(ranks)):
            found, count = execute(plan, lower_rank(plan, stage), stage, groups, ranks)
            error = max(error, (found - expected(plan)[stage]).abs().max().item())
            messages += count
    plan = Plan.parse(EXAMPLE)
    short = make_groups(timedelta(seconds=1))
    if rank >= plan.stages:
        return messages, error, ""
    try:
        execute(plan, two_ahead(plan)[rank], rank, short, (0, 1))
    except LinkLost as lost:
        time.sleep(1)  # before the other's connection goes with this process
        return messages, error, str(lost)
    return messages, error, "got through"


def test_random_plans_get_through_and_two_receives_ahead_do_not(tmp_path) -> None:
    found = run(RANKS, run_strictly, tmp_path)
    assert all(isinstance(one, tuple) for one in found), found
    planned = sum(
        2 * pipelines * 2 * (stages - 1) * len(plan.chunks)
        for stages, pipelines in ((4, 1), (2, 2))
        for plan in random_plans(stages)
    )
    assert sum(messages for messages, _, _ in found) == planned
    assert max(error for _, error, _ in found) < 1e-9
    stuck = [how for _, _, how in found[:2]]
    assert stuck[0].startswith("stage 0, iteration 0: waited for RECV:B1<1")
    assert stuck[1].startswith("stage 1, iteration 0: waited for RECV:F0<0")
    assert all("the link is lost: " in how for how in stuck)


def test_random_plans_split_backwards() -> None:
    kinds = {op.kind for plan in random_plans(2) for order in plan.orders for op in order}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT}
