"""What is learnt about memory and about time: budgets, drift, slow ranks; no trainer needed."""

import pytest

from megatron_epp.control.drift import BAND, PATIENCE, WINDOW, Drift
from megatron_epp.control.memory_budget import FILE_NAME, NEAR, Budget, Event
from megatron_epp.control.report import IterationReport, StageReport
from megatron_epp.ir import Kind, Op

# ------------------------------------------------------------------ budgets


def budget() -> Budget:
    return Budget((1000.0, 1000.0), (100.0, 0.0))


def test_a_failure_leaves_less_than_was_held() -> None:
    ours = budget()
    event = ours.failed(7, 1, 400, "F3, 0.4 GiB held")
    assert ours.stage_bytes == (1000.0, 380.0)
    assert str(event) == ("iteration 7 stage 1 budget_bytes 380 out of memory at F3, 0.4 GiB held")


def test_a_failure_always_takes_a_tenth_of_the_room() -> None:
    ours = budget()
    ours.failed(7, 0, 5000, "F3")  # more was held than was ever allowed
    assert ours.stage_bytes[0] == 100 + 0.9 * 900


def test_a_near_miss_takes_what_was_promised_too_little() -> None:
    ours = budget()
    learnt = ours.measured(7, (950.0, 900.0), (880, 990))
    # Stage 0: 850 promised for chunks, 880 held, of 900. Stage 1: 900 promised, 990 held of 1000.
    assert [event.stage for event in learnt] == [0, 1]
    assert all(event.iteration == 8 for event in learnt)
    assert ours.stage_bytes[1] == pytest.approx(1000 * 900 / 990 / 1.01, abs=1)
    # With the new budgets as promises, what was held is within the old ones.
    assert ours.stage_bytes[1] * 990 / 900 < 1000


@pytest.mark.parametrize(
    ("promised", "peak"),
    [
        (900.0, 905),  # as promised
        (500.0, 600),  # far from the budget
    ],
)
def test_nothing_is_learnt_without_need(promised, peak) -> None:
    ours = Budget((1000.0,), (0.0,))
    assert NEAR > 0.9
    assert ours.measured(1, (promised,), (peak,)) == []
    assert ours.stage_bytes == (1000.0,)


def test_a_resumed_run_knows_what_was_learnt_before_its_checkpoint(tmp_path) -> None:
    ours = budget()
    ours.failed(5, 0, 500, "F1")
    ours.failed(9, 1, 500, "F1")
    ours.save(str(tmp_path))
    early, late = budget(), budget()
    early.load(str(tmp_path), 6)
    late.load(str(tmp_path), 8)
    assert early.stage_bytes == (ours.stage_bytes[0], 1000.0)
    assert late.stage_bytes == ours.stage_bytes
    fresh = Budget((1.0,), (0.0,))  # another number of stages
    fresh.load(str(tmp_path), 8)
    assert fresh.stage_bytes == (1.0,)


def test_what_was_learnt_behind_the_checkpoint_is_learnt_again_in_time(tmp_path) -> None:
    ours = budget()
    ours.failed(5, 0, 500, "F1")
    ours.measured(8, (950.0, 900.0), (0, 990))
    ours.save(str(tmp_path))
    again = budget()
    again.load(str(tmp_path), 3)  # resumed where iteration 4 is the next
    assert again.stage_bytes == (1000.0, 1000.0)
    # Iteration 4 tells the same as it told then; from 5 on stage 0 has less.
    assert [event.iteration for event in again.measured(4, (900.0, 900.0), (10, 10))] == [5]
    assert again.stage_bytes == (ours.stage_bytes[0], 1000.0)
    # A near miss of an iteration that had none then is not learnt: the next plans would differ.
    assert again.measured(6, (900.0, 900.0), (10, 990)) == []
    again.save(str(tmp_path))
    assert (tmp_path / FILE_NAME).read_text().count("iteration") == 2
    # What is lower by now, because memory ran out on the way, is not raised.
    again.failed(7, 1, 300, "F2")
    assert again.measured(8, (950.0, 900.0), (0, 10)) == []
    assert again.stage_bytes == (ours.stage_bytes[0], 285.0)
    assert again.measured(9, (950.0, 270.0), (0, 284)) != []


def test_a_damaged_file_is_named_with_its_line(tmp_path) -> None:
    (tmp_path / FILE_NAME).write_text("stages 2\niteration 1 stage 0 budget_bytes 5 why\nno\n")
    with pytest.raises(ValueError, match=rf"{FILE_NAME}, line 3: 'no' is no budget event"):
        budget().load(str(tmp_path), 9)


def test_events_are_text_and_back() -> None:
    event = Event(3, 1, 2048, "near miss: held 1.020 of what was predicted")
    assert Event.parse(str(event)) == event


# ------------------------------------------------------------------ drift


def report(seconds: float, busy: tuple[float, ...], foretold: tuple[float, ...]):
    return IterationReport(
        tuple(
            StageReport(0, stage, 0.0, seconds, mine, 0.0, 1, predicted)
            for stage, (mine, predicted) in enumerate(zip(busy, foretold, strict=True))
        )
    )


def test_drift_is_told_once_and_when_it_is_over() -> None:
    drift = Drift()
    told = [drift.see(1.0, report(1.3, (1.0,), (1.0,))) for _ in range(WINDOW + 3)]
    assert [bool(words) for words in told] == [False] * (WINDOW - 1) + [True] + [False] * 3
    assert (
        f"took +30% against what was foretold (median; the band is {BAND:.0%})"
        in told[WINDOW - 1][0]
    )
    assert drift.alarmed
    back = [drift.see(1.0, report(1.0, (1.0,), (1.0,))) for _ in range(WINDOW)]
    assert sum(map(bool, back)) == 1
    assert not drift.alarmed


def test_one_slow_iteration_is_no_drift() -> None:
    drift = Drift()
    for number in range(3 * WINDOW):
        assert drift.see(1.0, report(9.0 if number % WINDOW == 0 else 1.0, (1.0,), (1.0,))) == []


def test_the_slow_rank_is_named_by_what_its_work_should_take() -> None:
    drift = Drift()
    # Stage 1 has twice the work and takes three times as long as foretold; stage 0 does as told.
    told = [drift.see(3.0, report(3.0, (1.0, 6.0, 1.0), (1.0, 2.0, 1.0))) for _ in range(PATIENCE)]
    assert told[:-1] == [[]] * (PATIENCE - 1)
    (line,) = told[-1]
    assert line.startswith("slow rank: stage 1 of replica 0 takes 3.00 times what the others take")


def test_all_slow_is_nobodys_fault() -> None:
    drift = Drift()
    for _ in range(WINDOW - 1):
        assert drift.see(2.0, report(2.0, (2.0, 4.0), (1.0, 2.0))) == []


# ------------------------------------------------------------------ reports


@pytest.mark.parametrize("failure", [None, Op(Kind.BACKWARD, 12)])
def test_a_report_is_numbers_and_back(failure) -> None:
    one = StageReport(1, 2, 0.5, 3.5, 2.0, 0.25, 2**40, 1.9, failure, 12345 if failure else 0)
    assert StageReport.from_row(one.row()) == one
    assert IterationReport((one,)).failures == ((one,) if failure else ())
