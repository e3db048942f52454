"""Replicas in lockstep: the step's header, empty chunks, one skeleton, one program."""

from dataclasses import replace
from random import Random

import pytest

from megatron_epp.ir import (
    Chunk,
    Op,
    Plan,
    PlanError,
    Step,
    check,
    check_op_templates,
    lower,
    lower_rank,
    needs_of,
)
from megatron_epp.ir.random_plan import arbitrary_block
from megatron_epp.ir.recompute import MLP_RECOMPUTED

STEP = """\
step v1
lockstep 2
deal 0: 0
deal 1: 1 2
plan v1
replica 0 of 2
documents 9
layers 2 1
chunk 0: 0[0:5]
chunk 1: 0[5:9]
chunk 2: -
recompute 0: 2k 1f1k 2k
recompute 1: 1k 1k 1k
stage 0: F0 F1 F2 B1 B0 B2
stage 1: F0 F1 B1 B0 F2 B2
plan v1
replica 1 of 2
documents 3 4
layers 2 1
chunk 0: -
chunk 1: 0[0:3]
chunk 2: 1[0:4]
recompute 0: 2k 1m1n 2c
recompute 1: 1k 1k 1a
stage 0: F0 F1 F2 B1 B0 B2
stage 1: F0 F1 B1 B0 F2 B2
"""


def test_text_and_back() -> None:
    step = Step.parse(STEP)
    assert str(step) == STEP and step.lockstep == 2
    assert step.plans[1].chunks[0] == Chunk(()) and not step.plans[1].chunks[0].tokens
    assert step.block(1) == step.plans
    check_op_templates(step)
    for plan in step.plans:
        check(plan)


def test_without_lockstep_nothing_is_said_of_it() -> None:
    step = Step.parse(STEP.replace("lockstep 2\n", ""))
    assert step.lockstep == 1 and "lockstep" not in str(step)
    assert step.block(1) == (step.plans[1],)
    assert step.digest != Step.parse(STEP).digest  # what ranks compare


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("lockstep 3", "lockstep 3: expected a divisor of the 2 replicas"),
        ("lockstep 1", "'lockstep 1': expected 'lockstep N' of at least 2 replicas, or no such"),
        ("lockstep 0", "'lockstep 0': expected 'lockstep N'"),
        ("lockstep two", "'lockstep two': expected 'lockstep N'"),
        ("lockstep 2 2", "'lockstep 2 2': expected 'lockstep N'"),
    ],
)
def test_a_header_that_is_none(header: str, says: str) -> None:
    with pytest.raises(PlanError) as refusal:
        Step.parse(STEP.replace("lockstep 2", header))
    assert str(refusal.value).startswith(says)


def test_it_stands_in_front_of_the_deals() -> None:
    with pytest.raises(PlanError, match="expected 'deal 1: DOCUMENT "):
        Step.parse(STEP.replace("lockstep 2\ndeal 0: 0\n", "deal 0: 0\nlockstep 2\n"))


@pytest.mark.parametrize("text", ["chunk 2:", "chunk 2: - -", "chunk 2: - 0[0:1]"])
def test_an_empty_chunk_is_one_dash(text: str) -> None:
    with pytest.raises(PlanError, match="line 7"):
        Plan.parse(STEP[STEP.index("plan v1") :].replace("chunk 2: -", text))


def test_another_order_is_refused_with_the_place() -> None:
    step = _changed(1, stage=1, order="F0 F1 B1 F2 B0 B2")
    with pytest.raises(PlanError) as refusal:
        check_op_templates(step)
    assert str(refusal.value).split("\n") == [
        "lockstep 2: replica 1 runs F2 on stage 1 where replica 0 runs B0; expected the same ops "
        "in the same order",
        "  replica 0:  F0  F1  B1 >B0  F2  B2",
        "  replica 1:  F0  F1  B1 >F2  B0  B2",
    ]


@pytest.mark.parametrize(
    ("stage", "order", "said"),
    [
        (0, "F0 F1 F2 B1 B0 I2 W2", "replica 1 runs I2 on stage 0 where replica 0 runs B2"),
        (1, "F0 F1 B1 B0 F2", "replica 1 runs nothing on stage 1 where"),
    ],
)
def test_ops_of_one_replica_alone_are_refused(stage: int, order: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_op_templates(_changed(1, stage=stage, order=order))


def test_an_empty_chunk_that_skips_its_ops_is_refused() -> None:
    """By the check of its own replica, and by that of the block."""
    step = _changed(1, stage=0, order="F1 F2 B1 B2")
    with pytest.raises(PlanError, match="stage 0: chunk 0 has ops none; expected F B or F I W"):
        check(step.plans[1])
    with pytest.raises(PlanError, match="replica 1 runs F1 on stage 0 where replica 0 runs F0"):
        check_op_templates(step)


@pytest.mark.parametrize("letter", sorted("kfcmnabo"))
def test_layers_that_run_their_mlp_again_are_the_same(letter: str) -> None:
    text = STEP.replace("recompute 0: 2k 1m1n 2c", f"recompute 0: 2k 1{letter}1n 2c")
    step = Step.parse(text.replace("1n1n", "2n"))
    if letter in "fmb":
        check_op_templates(step)
        return
    with pytest.raises(PlanError) as refusal:
        check_op_templates(step)
    assert "of chunk 1 on stage 0, replica 0 1f1k; expected the same layers" in str(refusal.value)


def test_another_number_of_chunks_is_refused() -> None:
    text = STEP.replace("chunk 2: -\n", "").replace("recompute 0: 2k 1f1k 2k", "recompute 0: 2k 2k")
    text = text.replace("recompute 1: 1k 1k 1k", "recompute 1: 1k 1k", 1)
    text = text.replace("stage 0: F0 F1 F2 B1 B0 B2", "stage 0: F0 F1 B1 B0", 1)
    text = text.replace("stage 1: F0 F1 B1 B0 F2 B2", "stage 1: F0 F1 B1 B0", 1)
    with pytest.raises(PlanError, match="replica 1 has 3 chunks, replica 0 2; expected the same"):
        check_op_templates(Step.parse(text))


def _changed(replica: int, stage: int, order: str) -> Step:
    step = Step.parse(STEP)
    plan = step.plans[replica]
    orders = list(plan.orders)
    orders[stage] = tuple(map(Op.parse, order.split()))
    plans = list(step.plans)
    plans[replica] = replace(plan, orders=tuple(orders))
    return replace(step, plans=tuple(plans))


@pytest.mark.parametrize("seed", range(30))
def test_random_blocks(seed: int) -> None:
    """They have one skeleton, each can run, and all have one program, whatever their chunks hold.
    A change of any op or of where the MLP runs again is noticed."""
    random = Random(seed)
    width = random.choice((2, 3, 4))
    lengths = [[random.randint(1, 60) for _ in range(random.randint(1, 6))] for _ in range(width)]
    plans = arbitrary_block(
        lengths, (2, 1), random, split_backward=random.choice((0.0, 0.5, 1.0)), modes="kfcmnabo"
    )
    numbers = iter(range(sum(map(len, lengths))))
    assignments = tuple(tuple(next(numbers) for _ in each) for each in lengths)
    step = Step(assignments, plans, width)
    assert Step.parse(str(step)) == step
    check_op_templates(step)
    for plan in plans:
        check(plan)
    for stage in range(2):
        assert len({lower_rank(plan, stage, plans) for plan in plans}) == 1
    assert lower_rank(plans[0], 0) == lower(plans[0])[0]
    broken = plans[-1]
    stage = random.randrange(2)
    order = list(broken.orders[stage])
    at = random.randrange(len(order) - 1)
    order[at], order[at + 1] = order[at + 1], order[at]
    orders = tuple(tuple(order) if s == stage else o for s, o in enumerate(broken.orders))
    with pytest.raises(PlanError, match="expected the same ops in the same order"):
        check_op_templates(Step(assignments, (*plans[:-1], replace(broken, orders=orders)), width))
    chunk = random.randrange(len(broken.chunks))
    other = "k" if broken.recompute[stage][chunk][0] in MLP_RECOMPUTED else "m"
    choices = [list(row) for row in broken.recompute]
    choices[stage][chunk] = other + choices[stage][chunk][1:]
    letters = tuple(map(tuple, choices))
    with pytest.raises(PlanError, match="expected the same layers to run their MLP again"):
        check_op_templates(
            Step(assignments, (*plans[:-1], replace(broken, recompute=letters)), width)
        )


def test_an_empty_chunk_needs_what_others_need() -> None:
    plan = Step.parse(STEP).plans[1]
    needs = list(needs_of(plan)(1, Op.parse("F0")))
    assert [(need.stage, where) for need, where, _ in needs] == [(-1, 0)]
