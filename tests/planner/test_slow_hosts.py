"""What plans lose on hosts that are slower than assumed, and that it is said only if it is much."""

import dataclasses

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.choose.slow_hosts import SLOW_HOST, slow_host_line, with_hosts
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.sim.play import play

SMALL = [1500] * 16
COST = named_cost("llama3-8b", "h100-80g", pp=4, tp=8, logits_held=False)
QUICK = Options(context=16_384, effort=1)


def planned(lengths: list[int], cost: Cost = COST):
    return PLANNERS["epp"](lengths, cost, QUICK)


def test_the_loss_is_against_a_plan_made_for_slow_hosts() -> None:
    ours = planned([9000, 4000, 2500, *[400] * 40])
    line = slow_host_line([ours], COST, QUICK, "epp")
    slow = with_hosts(COST, SLOW_HOST)
    taken = play(ours.plan, slow.table(ours.plan)).seconds
    loss = taken / planned(list(ours.plan.documents), slow).seconds - 1
    assert loss > 0.05 and line is not None
    assert line.startswith(f"On hosts 2 times as slow as assumed, this plan takes {loss:.0%} long")


@pytest.mark.parametrize("known", [True, False])
def test_nothing_is_said_of_measured_hosts_or_of_large_chunks(known: bool) -> None:
    profile = COST.layout.profile
    measured = dataclasses.replace(profile.provenance, kind="measured")
    profile = dataclasses.replace(profile, provenance=measured) if known else profile
    cost = COST.replace(profile=profile)
    lengths = SMALL if known else [120_000] * 8
    assert slow_host_line([planned(lengths, cost)], cost, QUICK, "epp") is None
