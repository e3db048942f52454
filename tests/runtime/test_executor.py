"""The executor on a small pipeline of hosts: numbers, messages, records, lost peers."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch

from megatron_epp.ir import HandOver, Kind, Payload, Plan, Post, StageOp, Timed, Transfer, lower
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.runtime.clock import HostClock
from megatron_epp.runtime.executor import CurrentOp, Executor
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.memory_meter import NoMeter
from tests.runtime.pipeline import WIDTH, on_host, reference, shape_of
from tests.runtime.world import run


def execute(
    plan: Plan,
    rank: int,
    groups: dict,
    compute: Any,
    iteration: int = 1,
    current_op: CurrentOp | None = None,
):
    """(records, links) of one iteration. ``compute``: of the rank's stage, or of each of them."""
    current_op = current_op or CurrentOp(rank)
    current_op.iteration = iteration
    executor = executor_of(plan, rank, compute, groups, current_op=current_op)
    return executor.run(), executor.links


def executor_of(
    plan: Plan,
    rank: int,
    compute: Any,
    groups: Mapping = MappingProxyType({}),
    *,
    links: Any = None,
    store: Store | None = None,
    current_op: CurrentOp | None = None,
    catch_errors: bool = False,
) -> Executor:
    """What runs the program of ``rank``; ``links``: other than those of ``groups``."""
    clock = HostClock()
    clock.start()
    links = links or Links(groups, shape_of(plan), torch.float64, torch.device("cpu"))
    store = Store({}) if store is None else store  # an empty one is false
    current_op = current_op or CurrentOp(rank)
    objects = compute, links, store, clock, NoMeter(), current_op
    return Executor(lower(plan)[rank], *objects, catch_errors=catch_errors)


def plans(ranks: int, stages: int) -> list[Plan]:
    """Of ``stages``, wherever they lie; stage i on rank i where there are as many."""
    made = []
    for seed in range(12):
        random = Random(seed)
        lengths = [random.randint(1, 20) for _ in range(random.randint(1, 6))]
        share = (0.0, 0.5, 1.0)[seed % 3]
        place: list[int] = []
        if stages > ranks:
            place = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
            random.shuffle(place)
        cut = (1,) * stages
        made.append(arbitrary_plan(lengths, cut, random, split_backward=share, place=place))
    return made


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one plan on one rank; ``gradients``: by stage; ``kept``: what stages still hold for their
    chunks."""

    gradients: dict[int, list[numpy.ndarray]]
    records: tuple[Timed, ...]
    sent: int
    received: int
    kept: int


def run_plans(rank: int, ranks: int, stages: int) -> list[Outcome]:
    """Every plan of ``plans``, one iteration after the other over the same groups."""
    groups: dict = {}
    if ranks > 1:
        import torch.distributed as dist

        groups = {payload: dist.new_group(group_desc=payload.name) for payload in Payload}
    outcomes = []
    for iteration, plan in enumerate(plans(ranks, stages)):
        computes = {stage: on_host(plan, stage) for stage in plan.stages_of(rank)}
        alone = computes[rank] if stages == ranks else computes
        records, links = execute(plan, rank, groups, alone, iteration)
        kept = sum(len(c._saved) + len(c._aside) for c in computes.values())
        gradients = {
            stage: [one.numpy() for one in compute.results()[:-1]]
            for stage, compute in computes.items()
        }
        outcomes.append(Outcome(gradients, records, links.sent, links.received, kept))
    return outcomes


def compare(found: list[list[Outcome]], stages: int) -> None:
    """Every rank's outcomes with those of one process, op by op, and with the programs."""
    for iteration, plan in enumerate(plans(len(found), stages)):
        programs, right = lower(plan), reference(plan)
        for rank, outcomes in enumerate(found):
            one = outcomes[iteration]
            assert tuple(one.gradients) == plan.stages_of(rank)
            for stage, gradients in one.gradients.items():
                for wanted, gradient in zip(right[stage], gradients, strict=True):
                    assert abs(wanted.numpy() - gradient).max() <= 1e-12 * wanted.abs().max()
            assert one.kept == 0
            # One record per op and transfer, in the program's order, one after the other.
            timed = [op for op in programs[rank] if not isinstance(op, (Post, HandOver))]
            assert list(map(own_end, one.records)) == [placed(plan, rank, op) for op in timed]
            times = [time for record in one.records for time in (record.start, record.stop)]
            assert times == sorted(times)
            kinds = [op.kind for op in programs[rank] if isinstance(op, Transfer)]
            assert one.sent == kinds.count(Kind.SEND)
            assert one.received == kinds.count(Kind.RECEIVE)


def own_end(record: Timed) -> tuple[int, Any]:
    return record.stage, record.op


def placed(plan: Plan, rank: int, item: Any) -> tuple[int, Any]:
    """(stage, op or transfer) of an item of the rank's program."""
    if isinstance(item, StageOp):
        return item.stage, item.op
    if isinstance(item, Transfer):
        return item.message.source if item.kind is Kind.SEND else item.message.target, item
    return plan.stages_of(rank)[0], item


@pytest.mark.parametrize("stages", [3, 7])
def test_random_plans_over_real_links(stages, tmp_path) -> None:
    """Each stage on a rank of its own; and several on a rank, placed at random, where the links
    lead both ways and stages hand over to their neighbours on the same rank."""
    found = run(3, run_plans, tmp_path, 3, stages)
    assert all(isinstance(one, list) for one in found), found
    compare(found, stages)
    handed = [any(isinstance(i, HandOver) for p in lower(plan) for i in p) for plan in plans(3, 7)]
    assert any(handed)


@pytest.mark.parametrize("stages", [1, 4])
def test_random_plans_on_one_rank(stages) -> None:
    """``stages`` of which hand over to each other without any message."""
    compare([run_plans(0, 1, stages)], stages)


# ------------------------------------------------------------------ what is our own bug

TWO = Plan.parse("""\
plan v1
documents 4 5
layers 1 1
chunk 0: 0[0:4]
chunk 1: 1[0:5]
stage 0: F0 F1 B0 B1
stage 1: F0 B0 F1 B1
""")

ALONE = Plan.parse("""\
plan v1
documents 4
layers 1
chunk 0: 0[0:4]
stage 0: F0 B0
""")


def test_a_tensor_for_nobody_is_noticed() -> None:
    generous = on_host(ALONE, 0)
    generous.backward = lambda chunk, gradient: torch.ones(4, WIDTH)  # of the first stage
    with pytest.raises(AssertionError, match="no op uses a received or computed tensor"):
        execute(ALONE, 0, {}, generous)


def test_a_tensor_of_another_shape_is_not_sent() -> None:
    program = lower(TWO)[1]
    links = Links({}, lambda chunk: (4, WIDTH), torch.float64, torch.device("cpu"))
    sends = (op for op in program if isinstance(op, Transfer) and op.kind is Kind.SEND)
    message = next(sends).message
    with pytest.raises(AssertionError, match=r"\(3, 6\), not \(4, 6\)"):
        links.send(message, torch.ones(3, WIDTH))
