"""What check accepts, and the one line that it refuses with."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.ir import Deadlock, Op, Plan, PlanError, check, slices_in, slices_of, walk
from tests.plans import EXAMPLE, any_plans, evaluation, reordered
from tests.refusals import refusal


@given(any_plans())
def test_arbitrary_plans_run(plan: Plan) -> None:
    check(plan)
    check(evaluation(plan))


@given(any_plans())
def test_walk_visits_every_op_once_in_each_ranks_order(plan: Plan) -> None:
    visited: list[list[tuple[int, Op]]] = [[] for _ in range(plan.ranks)]
    for stage, op in walk(plan, slices_of(plan)):
        visited[plan.rank_of[stage]].append((stage, op))
    assert tuple(map(tuple, visited)) == plan.rank_orders


@given(any_plans(), st.data())
def test_an_op_that_is_lost_or_doubled_is_found(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.ranks - 1))
    order = plan.rank_orders[rank]
    at = data.draw(st.integers(0, len(order) - 1))
    stage = order[at][0]
    for changed in (order[:at] + order[at + 1 :], (*order, order[at])):
        ran = (*plan.rank_orders[:rank], changed, *plan.rank_orders[rank + 1 :])
        damaged = reordered(plan, ran)
        if damaged.forward_only != plan.forward_only:  # the only backward is gone: an evaluation
            continue
        with pytest.raises(PlanError) as caught:
            check(damaged)
        assert str(caught.value).startswith(f"stage {stage}: ")


HEAD = "plan v1\ndocuments 9 4\nlayers 1\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "chunk 0: 0[0:5]\nchunk 1: 0[6:9] 1[0:4]\nstage 0: F0 F1 B1 B0\n",
            "document 0: inputs [5:6] are computed never (chunk 1 holds 0[6:9])",
        ),
        (
            "chunk 0: 0[0:5]\nchunk 1: 0[4:9] 1[0:4]\nstage 0: F0 F1 B1 B0\n",
            "document 0: inputs [4:5] are computed twice (chunk 1 holds 0[4:9])",
        ),
        (
            "chunk 0: 0[0:5]\nchunk 1: 0[5:9]\nstage 0: F0 F1 B1 B0\n",
            "document 1: inputs [0:4] are never computed",
        ),
        (
            "chunk 0: 0[0:9]\nchunk 1: 0[0:9] 1[0:4]\nstage 0: F0 F1 B1 B0\n",
            "document 0: inputs [0:9] are computed twice (chunk 1 holds 0[0:9])",
        ),
        (
            "chunk 0: 0[0:5] 1[0:2]\nchunk 1: 0[5:9] 1[2:4]\nstage 0: F0 F1 B1 B0\n",
            "chunk 0: holds slices of documents 0 and 1; expected at most one cut document",
        ),
        (
            "chunk 0: 0[0:9] 1[0:4]\nstage 0: F0 B0 B0\n",
            "stage 0: B0 stands 2 times; expected once",
        ),
        (
            "chunk 0: 0[0:9] 1[0:4]\nstage 0: F0 I0\n",
            "stage 0: chunk 0 has ops F I; expected F B or F I W",
        ),
        (
            "chunk 0: 0[0:9]\nchunk 1: 1[0:4]\nstage 0: F0\n",
            "stage 0: chunk 1 has ops none; expected F",
        ),
    ],
)
def test_what_is_computed_never_or_twice(text: str, error: str) -> None:
    assert refusal(PlanError, check, Plan.parse(HEAD + text)).startswith(error)


VOCABULARY = """\
plan v1
documents 5
layers 1 1
chunk 0: 0[0:5]
stage 0: F0 H0 B0 G0
stage 1: F0 H0 B0 G0
"""


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            "stage 0: F0 H0 B0",
            "stage 0: F0 B0",
            "stage 0: chunk 0 has ops B F G; expected F H B G or F H I W G",
        ),
        (
            "stage 0: F0 H0 B0 G0\nstage 1: F0 H0 B0 G0",
            "stage 0: F0 H0 B0 G0\nstage 1: F0 B0",
            "stage 1: chunk 0 has ops B F; expected F H B G or F H I W G",
        ),
        (
            "1: F0 H0 B0",
            "1: F0 B0 H0",
            "stage 1 at B0: lacks H0 of stage 1 (the gradient of the model's output)",
        ),
        (
            "stage 0: F0 H0 B0 G0\nstage 1: F0 H0 B0 G0",
            "stage 0: F0 H0\nstage 1: F0",
            "stage 1: chunk 0 has ops F; expected F H",
        ),
        (
            "layers 1 1\nchunk 0: 0[0:5]\nstage 0: F0 H0 B0 G0\nstage 1: F0 H0 B0 G0",
            "layers 2\nchunk 0: 0[0:5]\nstage 0: F0 H0 B0 G0",
            "stage 0 has ops H or G, which shard the LM head over the stages, and is the only "
            "one; expected at least 2 stages, or none of these ops",
        ),
    ],
)
def test_vocabulary_parallelism_is_whole_or_refused(old: str, new: str, error: str) -> None:
    check(Plan.parse(VOCABULARY))
    assert old in VOCABULARY
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(VOCABULARY.replace(old, new)))
    assert str(caught.value).splitlines()[0] == error


def test_a_wrong_order_is_drawn() -> None:
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(EXAMPLE.replace("F0 F1 F2 B1 B0 B2", "F0 F1 F2 B0 B1 B2")))
    assert str(caught.value) == (
        "stage 0 at B0: lacks B1 of stage 0 (the gradients of its K and V from the slice after)\n"
        "  step:      0   1   2   3   4   5   6   7   8   9\n"
        "  stage 0:  F0  F1   .   .  F2   .   . >B0  B1  B2  <- lacks B1 of stage 0\n"
        "  stage 1:   .  F0  F1  B1  B0  F2  B2   .   .   ."
    )


def test_a_deadlock_names_every_stage_that_waits() -> None:
    with pytest.raises(Deadlock) as caught:
        check(
            Plan.parse(
                EXAMPLE.replace("stage 1: F0 F1 B1 B0 F2 B2", "stage 1: F2 B2 F0 F1 B1 B0").replace(
                    "stage 0: F0 F1 F2 B1 B0 B2", "stage 0: F0 F1 B1 B0 F2 B2"
                )
            )
        )
    assert str(caught.value) == (
        "stage 0 at B1: lacks B1 of stage 1 (the gradient of its output); "
        "stage 1 at F2: lacks F2 of stage 0 (its input)\n"
        "  step:      0   1   2   3   4   5   6   7\n"
        "  stage 0:  F0  F1 >B1  B0  F2  B2   .   .  <- lacks B1 of stage 1\n"
        "  stage 1:   .   . >F2  B2  F0  F1  B1  B0  <- lacks F2 of stage 0"
    )


def test_a_long_order_is_shown_around_where_it_stands() -> None:
    chunks = "".join(f"chunk {c}: {c}[0:1]\n" for c in range(200))
    order = " ".join(f"F{c}" for c in range(200)) + " B0 B1 W2 "
    rest = " ".join(f"B{c}" for c in range(3, 200))
    text = f"plan v1\ndocuments {'1 ' * 200}\nlayers 1\n{chunks}stage 0: {order} I2 {rest}\n"
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(text))
    line, head, drawn = str(caught.value).splitlines()
    assert line == "stage 0 at W2: lacks I2 of stage 0 (what its I left for it)"
    assert head.startswith("  step:    ...  194  195 ") and head.endswith("  209 ...")
    assert drawn == (
        "  stage 0: ... F194 F195 F196 F197 F198 F199   B0   B1  >W2   I2   B3   B4   B5   B6   B7"
        "   B8 ...  <- lacks I2 of stage 0"
    )


def test_a_deep_plan_is_shown_around_the_stages_that_wait_for_each_other() -> None:
    """Stage 30 holds F5 back until a B that needs what stage 31 makes of it."""
    chunks = "".join(f"chunk {c}: {c}[0:1]\n" for c in range(9))
    order = " ".join(f"{kind}{c}" for kind in "FB" for c in range(9))
    late = order.replace("F5 ", "").replace("B0 ", "B0 F5 ")
    stages = "".join(f"stage {s}: {late if s == 30 else order}\n" for s in range(40))
    with pytest.raises(Deadlock) as caught:
        check(Plan.parse(f"plan v1\ndocuments{' 1' * 9}\nlayers{' 1' * 40}\n{chunks}{stages}"))
    line, _, *rows, hidden = str(caught.value).splitlines()
    assert line == (
        "stage 30 at B0: lacks B0 of stage 31 (the gradient of its output); "
        "stage 31 at F5: lacks F5 of stage 30 (its input); 38 more stages wait"
    )
    assert [row.split(":")[0] for row in rows] == [f"  stage {s}" for s in range(22, 38)]
    assert " F7  F8 >B0  F5  B1 " in rows[8] and rows[8].endswith("<- lacks B0 of stage 31")
    assert " >F5  F6  F7 " in rows[9] and rows[9].endswith("<- lacks F5 of stage 30")
    assert hidden == "  (24 more stages)" and max(map(len, rows)) < 120


def test_slices_are_worked_out_once_and_are_no_part_of_the_value() -> None:
    text = "plan v1\ndocuments 5\nlayers 1\nchunk 0: 0[0:2]\nchunk 1: 0[2:5]\n"
    text += "stage 0: F0 F1 B1 B0\n"
    plan, same = Plan.parse(text), Plan.parse(text)
    assert slices_of(plan) is slices_of(plan)
    assert slices_of(plan) == slices_in(same.documents, same.chunks)
    assert (plan, hash(plan), str(plan), repr(plan)) == (same, hash(same), str(same), repr(same))
    assert pickle.loads(pickle.dumps(plan)) == plan
    # A plan made from this one has slices of its own.
    with pytest.raises(PlanError, match="never computed"):
        slices_of(dataclasses.replace(plan, documents=(6,)))
