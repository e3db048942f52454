"""Plans of calls of replicas that share experts: same ops, own documents, the slowest decides."""

from dataclasses import replace
from random import Random

import pytest

from megatron_epp.ir import Plan, check, check_op_template
from megatron_epp.mcore.loops.slice_stage import groups_of
from megatron_epp.planner.calls.call_cost import CallDocuments
from megatron_epp.planner.calls.call_options import CallOptions
from megatron_epp.planner.calls.call_plan import call_plans
from tests.planner.calls.one_replica import call_plan
from tests.planner.calls.test_group_order import CURVED, rates
from tests.planner.calls.test_recompute import memory, peaks
from tests.planner.calls.test_trees import random_tree

LAYERS = (2, 2)
OPTIONS = CallOptions(reorder=False)


def random_calls(random: Random, trees: bool = False) -> list[CallDocuments]:
    """Two or three replicas with one to four micro-batches each."""
    calls = []
    for _ in range(random.randint(2, 3)):
        batches = [random_tree(random) for _ in range(random.randint(1, 4))]
        lengths, parents = zip(*batches, strict=True)
        calls.append(CallDocuments(lengths, parents if trees else ()))
    return calls


def require_runs(plans: tuple[Plan, ...], calls: list[CallDocuments]) -> None:
    check_op_template(plans)
    for replica, (plan, call) in enumerate(zip(plans, calls, strict=True)):
        check(plan)  # each token once, slices in order
        assert (plan.replica, plan.replicas) == (replica, len(calls))
        assert plan.documents == tuple(length for of in call.lengths for length in of)
        groups_of(plan, [number for number, of in enumerate(call.lengths) for _ in of])
    for chunk in range(len(plans[0].chunks)):
        assert any(plan.chunks[chunk].spans for plan in plans)
    assert len({plan.predicted for plan in plans}) == 1


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("trees", [False, True])
def test_replicas_run_the_same_ops_on_their_own_documents(forward_only, trees) -> None:
    random, empty, cut = Random(6), 0, 0
    for _ in range(30):
        calls = random_calls(random, trees)
        plans = call_plans(calls, LAYERS, rates(2, CURVED), OPTIONS, forward_only)
        require_runs(plans, calls)
        empty += sum(not chunk.spans for plan in plans for chunk in plan.chunks)
        cut += len(plans[0].chunks) > max(len(call.lengths) for call in calls)
    assert empty > 0 and cut > 0


def test_an_op_takes_as_long_as_on_the_slowest_replica() -> None:
    calls = [CallDocuments([(6000, 300), (200,)]), CallDocuments([(500,), (400, 700), (3000,)])]
    plans = call_plans(calls, LAYERS, rates(2, CURVED), OPTIONS, False)
    whole = call_plans(calls, LAYERS, rates(2, CURVED), replace(OPTIONS, cut=False), False)
    alone = [
        call_plan(call.lengths, LAYERS, rates(2, CURVED), OPTIONS, False).predicted.seconds
        for call in calls
    ]
    assert max(alone) <= plans[0].predicted.seconds < whole[0].predicted.seconds
    same = call_plans([calls[0]] * 2, LAYERS, rates(2, CURVED), OPTIONS, False)
    assert same[0].predicted.seconds == pytest.approx(alone[0])
    assert (
        same[0].orders
        == call_plan(calls[0].lengths, LAYERS, rates(2, CURVED), OPTIONS, False).orders
    )


def test_all_replicas_recompute_what_the_fullest_must() -> None:
    calls = [CallDocuments([(4000,)] * 3), CallDocuments([(300,), (200, 100), (50,), (10,)])]
    limit = 20_000.0
    options = replace(OPTIONS, memory=memory(limit))
    plans = call_plans(calls, (4, 4), rates(2, CURVED), options, False)
    require_runs(plans, calls)
    assert plans[0].recompute == plans[1].recompute
    assert any("f" in modes for stage in plans[0].recompute for modes in stage)
    kept = [chunk for chunk in plans[0].chunks if chunk.spans]
    assert len(kept) < len(plans[0].chunks)  # the fourth micro-batch is the other replica's alone
    assert max(peaks(plans[0], calls[0].lengths)) <= limit
