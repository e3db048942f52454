"""Dealing to replicas, and choosing degrees."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from random import Random

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Step
from megatron_epp.planner import replicas
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.planner.options import ALL, Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import balance_replicas, plan_part, plan_step
from tests.planner.cases import machine


def heavy_tailed(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [min(60_000, int(random.lognormvariate(7.5, 1.3)) + 1) for _ in range(count)]


@pytest.mark.parametrize("planner", ["epp", "infinipipe", "packing"])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_step_deals_everything_and_plans_each_replica(planner, replicas) -> None:
    lengths = heavy_tailed(1, 60)
    cost = machine(pp=3, room_gib=20)
    options = Options(effort=0)
    made = plan_step(lengths, cost, options, planner, replicas)
    assert made.step.lengths == tuple(lengths)
    assert Step.parse(str(made.step)) == made.step
    assert made.seconds == max(planned.seconds for planned in made.planned)
    assert [p.plan for p in made.planned] == list(made.step.plans)
    again = plan_step(lengths, cost, options, planner, replicas)
    assert again.step.digest == made.step.digest
    # Who plans for one replica alone plans the same for it: as for its documents by themselves.
    for replica in {0, replicas - 1}:
        part = plan_part(lengths, cost, options, planner, replicas, replica)
        assert part.plans == made.step.part(replica).plans
        assert part.assignments == made.step.part(replica).assignments
        own = [lengths[document] for document in part.assignments[0]]
        alone = str(PLANNERS[planner](own, cost, options).plan)
        mine = str(part.plans[0]).replace(f"replica {replica} of {replicas}", "replica 0 of 1")
        assert mine == alone


@pytest.mark.parametrize("lockstep", [1, 2])
def test_processes_of_their_own_plan_the_same(lockstep) -> None:
    """As ``plan`` has the replicas planned on all cores."""
    lengths, cost = heavy_tailed(3, 40), machine(pp=2)
    options = Options(effort=0, lockstep=lockstep)
    here = plan_step(lengths, cost, options, "epp", 4)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, fork) as pool:
        there = plan_step(
            *(lengths, cost, options, "epp", 4),
            run=lambda function, tasks: pool.map(function, *zip(*tasks, strict=True)),
        )
    assert there.step == here.step
    assert all(planned.plan_seconds > 0 for planned in there.planned)


@pytest.mark.parametrize("placement", ["even", "v", "interleaved 4"])
def test_second_division_counts_the_work_of_all_stages_of_a_rank(placement, monkeypatch) -> None:
    """What it keeps of the first plans' times is their bubbles, a small part of them."""
    divided = []
    balance = replicas.balance_blocks

    def spy(lengths, cost, blocks, lockstep, overhead, seconds):
        divided.append(overhead)
        return balance(lengths, cost, blocks, lockstep, overhead, seconds)

    monkeypatch.setattr(replicas, "balance_blocks", spy)
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8)
    cost = cost if placement == "even" else placed_cost(cost, placement)
    made = plan_step([60_000, *[900] * 60], cost, Options(effort=1), "epp", 2)
    first, second = divided
    assert first is None and max(second) < 0.3 * made.seconds


def test_replicas_end_together() -> None:
    """Not by token counts: one long document weighs more than as many tokens in short ones."""
    lengths = [60_000] + [1_000] * 240
    cost = machine(pp=2)
    made = plan_step(lengths, cost, Options(levers=ALL), "epp", 2)
    seconds = [planned.seconds for planned in made.planned]
    assert max(seconds) < 1.05 * min(seconds)
    tokens = [sum(plan.documents) for plan in made.step.plans]
    assert max(tokens) > 1.1 * min(tokens)


def test_as_many_replicas_as_documents() -> None:
    assert sorted(balance_replicas([5, 1, 1], machine(), 3)) == [(0,), (1,), (2,)]
    with pytest.raises(ValueError, match="2 documents for 3 replicas: expected at least one"):
        balance_replicas([5, 1], machine(), 3)


def test_dealing_does_not_depend_on_the_order() -> None:
    lengths = heavy_tailed(2, 40)
    shuffled = list(lengths)
    Random(3).shuffle(shuffled)
    cost = machine()

    def dealt(batch: list[int]) -> list[list[int]]:
        return [sorted(batch[d] for d in held) for held in balance_replicas(batch, cost, 4)]

    assert dealt(lengths) == dealt(shuffled)
