"""Planned orders that take longer than predicted give way to the caller's, and come back."""

import pytest

from megatron_epp.planner.calls.call_options import AS_CALLED, PAYS_FROM, PLANNED, CallOptions
from megatron_epp.planner.calls.call_plan import unsliced_plan
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.planner.calls.track_record import CHECK, MOST, RECENT_CALLS, RETRY, TrackRecord
from tests.planner.calls.test_group_order import rates

TOKENS = [100, 400, 100, 300, 100, 200, 100, 350]


def test_a_planned_order_has_its_correction() -> None:
    record = TrackRecord()
    assert record.correction == 1.0
    record.saw(True, 1.0, 1.2)
    assert record.correction == pytest.approx(1.2)  # the caller's order is believed until measured
    record.saw(False, 2.0, 2.4)
    assert record.correction == 1.0  # whatever slows both down
    record.saw(True, 1.0, 40.0)
    record.saw(True, 1.0, 40.0)
    assert record.correction == MOST


def test_faster_than_predicted_is_no_reason_for_more() -> None:
    record = TrackRecord()
    record.saw(True, 1.0, 0.5)
    assert record.correction == 1.0


def test_one_slow_call_among_many_counts_little() -> None:
    record = TrackRecord()
    for measured in [1.0] * (RECENT_CALLS - 1) + [3.0]:
        record.saw(True, 1.0, measured)
    assert record.correction == 1.0


def test_what_was_not_measured_says_nothing() -> None:
    record = TrackRecord()
    record.saw(True, 0.0, 5.0)
    record.saw(True, 5.0, 0.0)
    assert record.correction == 1.0


def test_after_many_calls_in_the_callers_order_a_planned_one_is_tried() -> None:
    record = TrackRecord()
    record.saw(True, 1.0, 1.6)
    for _ in range(RETRY - 1):
        record.saw(False, 1.0, 1.0)
        assert record.correction == pytest.approx(1.6)
    record.saw(False, 1.0, 1.0)
    assert record.correction == 1.0


def test_after_many_calls_in_planned_orders_the_callers_is_measured() -> None:
    record = TrackRecord()
    for _ in range(CHECK - 1):
        record.saw(True, 1.0, 1.1)
        assert not record.due
    record.saw(True, 1.0, 1.1)
    assert record.due
    record.saw(False, 1.0, 0.9)  # the caller's order was thought too slow
    assert not record.due and record.correction == pytest.approx(1.22)


def test_what_does_not_pay_runs_in_the_callers_order() -> None:
    extents = [MicrobatchShape(count) for count in TOKENS]
    planned, given = (
        unsliced_plan(extents, (1,) * 4, rates(4), CallOptions(correction=correction), False)
        for correction in (1.0, 2.0)
    )
    assert planned.predicted is not None and given.predicted is not None
    assert (planned.predicted.planner, given.predicted.planner) == (PLANNED, AS_CALLED)
    assert planned.predicted.seconds < given.predicted.seconds * (1 - PAYS_FROM)
    assert [op.chunk for op in given.orders[0] if op.kind.value == "F"] == list(range(8))
    # The correction that it takes is what the planned order gains.
    pays = given.predicted.seconds * (1 - PAYS_FROM) / planned.predicted.seconds
    for correction, name in ((pays - 1e-6, PLANNED), (pays + 1e-6, AS_CALLED)):
        plan = unsliced_plan(extents, (1,) * 4, rates(4), CallOptions(correction=correction), False)
        assert plan.predicted is not None and plan.predicted.planner == name
