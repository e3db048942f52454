"""Records become a picture's content: what is idle and why, what was critical, what was held."""

import dataclasses

import pytest

from megatron_epp.ir import Kind, Message, Op, Payload, Plan, PlanError, Timed, Transfer
from megatron_epp.show.reasons import LATE
from megatron_epp.show.timeline import (
    chunk_names,
    local_fraction,
    memory_curve,
    offloaded_fraction,
    offloaded_ratio,
    offloaded_text,
    recomputed_fraction,
    recomputes,
    timeline,
    timeline_of,
)
from tests.show.plans import EXAMPLE, example, one_f_one_b, played, split_example

PLANS = {"example": example, "split": split_example, "1f1b": lambda: one_f_one_b(4, 8)}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seed", range(3))
def test_records_tell_what_the_simulator_says(plan, seed):
    """Where links cost nothing, the reasons read from records are the simulator's own."""
    run = played(PLANS[plan](), seed)
    told, read = timeline_of(run), timeline(run.plan, run.records)
    assert read.bubbles == told.bubbles
    assert read.critical == told.critical
    assert read.seconds == told.seconds == run.seconds
    assert read.bubble_ratio == pytest.approx(run.bubble_ratio)


@pytest.mark.parametrize("plan", PLANS)
def test_the_curve_from_peaks_never_lies_below_the_truth(plan):
    run = played(PLANS[plan]())
    for stage in range(run.plan.stages):
        records = [record for record in run.records if record.stage == stage]
        read, true = memory_curve(records, run.seconds), run.memory_curve(stage)
        for at in sorted({t for curve in (read, true) for t, _ in curve if t < records[-1].stop}):
            assert _held(read, at) >= _held(true, at) - 1
        for record in records:
            middle = (record.start + record.stop) / 2
            assert _held(read, middle) == pytest.approx(_held(true, middle), abs=1)
        assert max(held for _, held in read) == pytest.approx(run.peak_bytes[stage], abs=1)


def _held(curve, at):
    value = 0.0
    for when, held in curve:
        if when > at:
            break
        value = held
    return value


def test_a_curve_lasts_from_begin_to_end():
    run = played(example())
    for curve in timeline_of(run).curves:
        assert curve[0] == (0.0, 1e9)
        assert curve[-1] == (run.seconds, 1e9)


def test_a_wait_without_a_producer_is_the_hosts():
    plan = one_f_one_b(1, 2)
    times = {"F0": (0.0, 1.0), "B0": (1.0, 2.0), "F1": (3.0, 4.0), "B1": (4.0, 5.0)}
    records = [Timed(0, Op.parse(name), *span) for name, span in times.items()]
    assert [bubble.reason for bubble in timeline(plan, records).bubbles] == [LATE]


def test_a_stage_that_is_done_says_so():
    reasons = {bubble.reason for bubble in timeline_of(played(one_f_one_b(2, 2))).bubbles}
    assert "the stage has finished" in reasons


def test_what_chunks_hold_in_words():
    assert chunk_names(example()) == (
        "slice 1 of 2 of document 0",
        "slice 2 of 2 of document 0 and 1 whole document",
        "1 whole document",
    )
    assert recomputed_fraction(example(), 0, 0) == 0.75
    assert recomputed_fraction(example(), 1, 0) == 0.0


def test_a_chunk_is_named_with_the_ranks_of_its_local_documents():
    text = EXAMPLE.replace("1[0:1500]", "1[0:1500]@1").replace("2[0:900]", "2[0:900]@0")
    plan = Plan.parse(text)
    assert chunk_names(plan)[1:] == (
        "slice 2 of 2 of document 0 and 1 whole document (1 local, to rank 1)",
        "1 whole document (1 local, to rank 0)",
    )
    assert local_fraction(plan) == pytest.approx(2400 / 11400)
    assert local_fraction(example()) == 0


def test_what_is_offloaded_is_not_recomputed():
    text = EXAMPLE.replace("3f1k 4k 2c2k", "2f1o1k 4o 2c2k")
    plan = Plan.parse(text)
    assert [recomputed_fraction(plan, 0, c) for c in range(3)] == [0.5, 0.0, 0.5]
    assert [offloaded_fraction(plan, 0, c) for c in range(3)] == [0.25, 1.0, 0.0]
    assert offloaded_ratio(plan) == (5000 * 1 + 5500 * 4) / (11_400 * 8)
    assert offloaded_text(plan) == ", offloaded 29.6%"
    assert offloaded_text(example()) == ""
    assert recomputes(plan) and recomputes(example())
    assert not recomputes(Plan.parse(EXAMPLE.replace("3f1k 4k 2c2k", "3o1k 4k 2o2k")))


def test_transfers_are_kept_apart():
    run = played(example())
    message = Message(Payload.ACTIVATION, 0, 0, 1)
    wait = Timed(1, Transfer(Kind.RECEIVE, message), 0.0, 0.5)
    content = timeline(run.plan, [*run.records, wait])
    assert content.transfers == (wait,)
    assert len(content.records) == len(run.records)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 7}, "a record has stage 7; the plan has 2 stages"),
        ({"stop": -1.0}, "stage 0: F0 stops before it starts"),
        ({"op": Op(Kind.WEIGHT, 0)}, "a record of W0, which the plan does not hold"),
        ({"op": Op(Kind.FORWARD, 1)}, "stage 0: two records of F1"),
    ],
)
def test_records_of_something_else_are_refused(change, message):
    run = played(example())
    first, *rest = run.records
    with pytest.raises(PlanError, match=message):
        timeline(run.plan, [dataclasses.replace(first, **change), *rest])
