"""What overlaps computation, and what does not."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Plan, walk
from megatron_epp.ir.random_plan import placed
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.sim.exchange import exchange, messages
from megatron_epp.sim.play import play

LENGTHS = (20000, 9000, 4000, 3000, 2000, 1000)


def planned(**how) -> tuple[Cost, Plan]:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, cp=4, topology="nodes", **how)
    return cost, PLANNERS["packing"](LENGTHS, cost, Options()).plan


def test_the_exchange_is_the_bytes_over_the_ring() -> None:
    cost, plan = planned(dp=4)
    told = exchange(cost, play(plan, cost.table(plan)))
    assert cost.layout.network is not None
    dense, _ = cost.memory.parameters
    # 16 copies of every weight, 8 to a node: a ring that enters and leaves two nodes.
    rate = min(360e9, 8 * cost.layout.network.share_bytes_per_second)
    assert told.reduce_seconds == pytest.approx(dense * 4 * 15 / 16 / rate)
    assert told.gather_seconds == pytest.approx(dense * 2 * 15 / 16 / rate)
    assert told.seconds == pytest.approx(float(dense.max()) * 6 * 15 / 16 / rate)


def test_computation_hides_what_is_overlapped_and_only_that() -> None:
    cost, plan = planned(dp=4)
    played = play(plan, cost.table(plan))
    hidden = exchange(cost, played)
    whole = max(hidden.reduce_seconds) + max(hidden.gather_seconds)
    assert 0 <= hidden.exposed_seconds < 0.5 * whole
    # On a link a hundred times slower computation is too short.
    assert cost.layout.network is not None
    slow = dataclasses.replace(
        cost.layout.network, share_bytes_per_second=cost.layout.network.share_bytes_per_second / 100
    )
    late = exchange(cost.replace(network=slow), played)
    assert late.exposed_seconds > 0.5 * late.seconds


def test_one_copy_of_every_weight_exchanges_nothing() -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8, topology="nodes")
    plan = PLANNERS["packing"](LENGTHS, cost, Options()).plan
    assert exchange(cost, play(plan, cost.table(plan))).seconds == 0


def test_messages_are_exposed_as_far_as_the_iteration_waits_for_them() -> None:
    cost, plan = planned()
    table = cost.table(plan)
    told = messages(plan, table, play(plan, table))
    assert told.seconds > 0
    ten = {payload: 10 * each for payload, each in table.link_seconds.items()}
    slow = dataclasses.replace(table, link_seconds=ten)
    more = messages(plan, slow, play(plan, slow))
    assert more.exposed_seconds > told.exposed_seconds
    assert more.seconds > 5 * told.seconds
    free = dataclasses.replace(
        table,
        link_seconds={payload: np.zeros_like(each) for payload, each in table.link_seconds.items()},
        link_latency_seconds=0.0,
    )
    assert messages(plan, free, play(plan, free)).exposed_seconds == 0


def test_a_rank_exchanges_for_all_its_stages() -> None:
    cost, plan = planned(dp=4)
    turns = [stage for stage, _ in walk(plan)]
    shared = placed(dataclasses.replace(plan, predicted=None), (0, 0), turns)
    one = exchange(cost, play(shared, cost.table(shared)))
    two = exchange(cost, play(plan, cost.table(plan)))
    assert one.reduce_seconds == pytest.approx([sum(two.reduce_seconds)])
    assert one.gather_seconds == pytest.approx([sum(two.gather_seconds)])
