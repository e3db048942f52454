"""Stages placed on ranks: the text of such plans, what checks and programs make of them."""

import re

import pytest

from megatron_epp.control.accept import accept
from megatron_epp.control.step_source import SourcedStep
from megatron_epp.ir import Deadlock, Plan, PlanError, Step, check, lower
from tests.plans import EXAMPLE, INTERLEAVED, V_SHAPE


@pytest.mark.parametrize("text", [INTERLEAVED, V_SHAPE])
def test_written_by_hand_they_print_as_themselves_and_run(text: str) -> None:
    plan = Plan.parse(text)
    assert str(plan) == text and Plan.parse(text) == plan
    assert (plan.stages, plan.ranks, plan.shares_ranks) == (4, 2, True)
    check(plan)


def test_a_plan_knows_its_stages_and_its_ranks() -> None:
    plan = Plan.parse(V_SHAPE)
    assert plan.rank_of == (0, 1, 1, 0)
    assert [plan.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert plan.rank_name(1) == "rank 1"
    assert [plan.op_name(*place) for place in plan.rank_orders[1][:4]] == [
        "F1.0",
        "F2.0",
        "F1.1",
        "F2.1",
    ]
    assert list(map(str, plan.orders[3])) == ["F0", "B0", "F1", "B1"]
    alone = Plan.parse(EXAMPLE)
    assert alone.rank_of == (0, 1) and not alone.shares_ranks and alone.place == ()
    assert alone.rank_name(1) == "stage 1" and alone.op_name(1, alone.orders[1][0]) == "F0"


def test_stages_that_swap_ranks_keep_their_lines() -> None:
    text = EXAMPLE.replace("layers 4 4\n", "layers 4 4\nplace 1 0\n")
    plan = Plan.parse(text)
    check(plan)
    assert str(plan) == text and plan.digest != Plan.parse(EXAMPLE).digest
    assert [plan.rank_name(rank) for rank in range(2)] == ["stage 1", "stage 0"]
    assert plan.rank_orders[0][0][0] == 1
    assert lower(plan)[1][:2] == lower(Plan.parse(EXAMPLE))[0][:2]


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("place 0 1 1 0", "place 0 1 2 3", "stage i is on rank i without this line: remove it"),
        ("place 0 1 1 0", "place 0 1 1", "3 ranks; expected one for each of 4 stages"),
        ("place 0 1 1 0", "place 0 2 2 0", "rank 1 has no stage; expected at least one"),
        ("place 0 1 1 0", "place 0 1 one 0", "'one' is not a whole number"),
        ("place 0 1 1 0\n", "", "the order is plan, replica, documents, prefix, layers, place, "),
        ("rank 1: ", "stage 1: ", "expected 'rank 1:', as a rank has several stages"),
        ("rank 1: F1.0", "rank 1: F0", "'F0' is not an op of a stage; expected F, B, I, W, H or G"),
        ("rank 1: F1.0", "rank 1: F4.0", "F4.0 names stage 4; there are 4"),
        ("rank 1: F1.0", "rank 1: F0.0", "rank 0 runs 4 ops of stage 0, which has 5"),
        ("rank 1: F1.0", "rank 1: F1.9", "stage 1: F9 names chunk 9; there are 2"),
        ("rank 1: F1.0", "rank 1: F1.1", "stage 1: F1 stands 2 times; expected once"),
    ],
)  # fmt: skip
def test_errors(old: str, new: str, error: str) -> None:
    assert V_SHAPE.count(old) == 1
    with pytest.raises(PlanError, match=re.escape(error)):
        check(Plan.parse(V_SHAPE.replace(old, new)))


def test_a_wrong_order_on_a_rank_is_drawn_by_rank() -> None:
    """Both stages of the fold lie on rank 1, so nobody else can mend that."""
    swapped = V_SHAPE.replace("rank 1: F1.0 F2.0", "rank 1: F2.0 F1.0")
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(swapped))
    assert not isinstance(caught.value, Deadlock)
    line, steps, *rows = str(caught.value).split("\n")
    assert line == "stage 2 at F0: lacks F0 of stage 1 (its input)"
    assert steps.split()[0] == "step:" and rows[0].startswith("  rank 0: ")
    assert ">F2.0  F1.0" in rows[1] and rows[1].endswith("<- lacks F0 of stage 1")
    assert ">F3.0" in rows[0] and "lacks" not in rows[0]  # waits, but is not to blame


def test_a_deadlock_of_ranks_is_named_by_its_stages() -> None:
    text = INTERLEAVED.replace("rank 0: F0.0", "rank 0: F2.0 F0.0", 1).replace(
        " F2.0 F2.1", " F2.1"
    )
    with pytest.raises(Deadlock) as caught:
        check(Plan.parse(text))
    line, *_, low, high = str(caught.value).split("\n")
    assert line == (
        "stage 2 at F0: lacks F0 of stage 1 (its input); "
        "stage 1 at F0: lacks F0 of stage 0 (its input)"
    )
    assert low.lstrip().startswith("rank 0:") and high.lstrip().startswith("rank 1:")


def test_a_rank_hands_over_to_itself_without_a_message() -> None:
    first, second = (" ".join(map(str, program)) for program in lower(Plan.parse(V_SHAPE)))
    assert "F1.0 HAND:F0>2 POST:F1<0 F2.0 SEND:F0>3" in second
    assert "B2.0 HAND:B0>1 B1.0 SEND:B0>0" in second
    assert second.count("SEND") == first.count("RECV") == 4
    assert first.startswith("F0.0 SEND:F0>1 ")
    assert first.count("F3.0 B3.0 SEND:B0>2") == 1  # the loss: nothing to wait for


def test_a_job_of_another_placement_refuses_it_in_one_line() -> None:
    step = Step.parse(V_SHAPE)
    plan = step.plans[0]
    given = SourcedStep(step, str(step), "v.plan"), step.lengths, False, plan.layers, 0, 1
    with pytest.raises(PlanError) as caught:
        accept(*given)
    assert str(caught.value) == (
        "v.plan is for stages on ranks 0 1 1 0; this job has stage i on rank i (--epp-placement)"
    )
    accept(*given, placement=(0, 1, 1, 0))
