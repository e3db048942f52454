"""Dealing to replicas, and choosing degrees."""

from random import Random

import pytest

from megatron_epp.cost.cost import named_cost
from megatron_epp.ir import Step
from megatron_epp.planner import ALL, Options, choose, deal, plan_step
from megatron_epp.planner.degrees import splits
from tests.planner.cases import machine


def heavy_tailed(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [min(60_000, int(random.lognormvariate(7.5, 1.3)) + 1) for _ in range(count)]


@pytest.mark.parametrize("planner", ["epp", "infinipipe", "packing"])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_a_step_deals_everything_and_plans_each_replica(planner, replicas) -> None:
    lengths = heavy_tailed(1, 60)
    cost = machine(pp=3, room_gib=20)
    made = plan_step(lengths, cost, Options(effort=1), planner, replicas)
    assert made.step.lengths == tuple(lengths)
    assert Step.parse(str(made.step)) == made.step
    assert made.seconds == max(planned.seconds for planned in made.planned)
    assert [p.plan for p in made.planned] == list(made.step.plans)
    again = plan_step(lengths, cost, Options(effort=1), planner, replicas)
    assert again.step.digest == made.step.digest


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
    assert sorted(deal([5, 1, 1], machine(), 3)) == [(0,), (1,), (2,)]
    with pytest.raises(ValueError, match="2 documents for 3 replicas: expected at least one"):
        deal([5, 1], machine(), 3)


def test_dealing_does_not_depend_on_the_order() -> None:
    lengths = heavy_tailed(2, 40)
    shuffled = list(lengths)
    Random(3).shuffle(shuffled)
    cost = machine()

    def dealt(batch: list[int]) -> list[list[int]]:
        return [sorted(batch[d] for d in held) for held in deal(batch, cost, 4)]

    assert dealt(lengths) == dealt(shuffled)


def test_degrees_are_chosen_among_those_that_fit() -> None:
    lengths = heavy_tailed(4, 40)

    def make_cost(cp: int, pp: int):
        return named_cost("gpt-7b", "a100-80g", pp=pp, cp=cp)

    choice = choose(lengths, make_cost, 16, 32, Options(effort=1))
    assert choice.cp * choice.pp == 16
    assert choice.planned.fits
    for cp, pp, seconds in choice.tried:
        assert cp * pp == 16
        assert choice.planned.seconds <= seconds
    fixed = choose(lengths, make_cost, 16, 32, Options(effort=1), pp=4)
    assert (fixed.cp, fixed.pp) == (4, 4)
    assert choice.planned.seconds <= fixed.planned.seconds


def test_no_degree_fits() -> None:
    def make_cost(cp: int, pp: int):
        return named_cost("gpt-30b", "a100-40g", pp=pp, cp=cp)

    with pytest.raises(ValueError, match=r"no split of 2 devices into cp x pp fits: .*GiB"):
        choose([100], make_cost, 2, 60, Options())


def test_splits_respect_the_layers() -> None:
    assert list(splits(8, 4)) == [(8, 1), (4, 2), (2, 4)]
    assert list(splits(8, 40, cp=4)) == [(4, 2)]
