"""What is learnt about memory and about time: budgets, drift, slow ranks; no trainer needed."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.control.drift import BAND, PATIENCE, RECENT, Drift
from megatron_epp.control.memory_budget import BUDGET_FILE, NEAR, Event, MemoryBudget, cut
from megatron_epp.control.report import IterationReport, RankReport

# ------------------------------------------------------------------ budgets


def budget() -> MemoryBudget:
    return MemoryBudget((1000.0, 1000.0), (100.0, 0.0))


def test_a_failure_leaves_less_than_was_held_and_takes_a_tenth_of_the_room() -> None:
    ours = budget()
    ours.failed(7, 0, 5000, "F3")  # more was held than was ever allowed
    assert ours.device_bytes[0] == 100 + 0.9 * 900
    ours = budget()
    event = ours.failed(7, 1, 400, "F3, 0.4 GiB held")
    assert ours.device_bytes == (1000.0, 380.0)
    assert str(event) == (
        "iteration 7 pipeline rank 1 budget_bytes 380 correction 1.000000 out of memory at F3, "
        "0.4 GiB held"
    )


def test_a_near_miss_takes_what_was_predicted_too_little() -> None:
    ours = budget()
    learnt = ours.measured(7, (950.0, 900.0), (880, 990))
    # Rank 0: 850 predicted for chunks, 880 held, of 900. Rank 1: 900 predicted, 990 held of 1000.
    assert [event.rank for event in learnt] == [0, 1]
    assert all(event.iteration == 8 for event in learnt)
    assert ours.planned_bytes == pytest.approx((100 + 900 * 850 / 880, 1000 * 900 / 990), rel=1e-5)
    # Planned for that, what is held is within what may be held, and nothing more is to be learnt.
    held = [
        (planned - states) * error
        for planned, states, error in zip(
            ours.planned_bytes, ours.states_bytes, (880 / 850, 990 / 900), strict=True
        )
    ]
    assert held[0] <= 900 and held[1] <= 1000
    assert ours.measured(8, ours.planned_bytes, held) == []
    assert ours.device_bytes == (1000.0, 1000.0)


def learn(ours: MemoryBudget, error, iterations: int) -> list[float]:
    """A planner that fills its budget and a stage that holds ``error(iteration)`` times that."""
    rooms = []
    for iteration in range(1, iterations + 1):
        predicted = ours.planned_bytes[0]
        rooms.append(predicted - ours.states_bytes[0])
        ours.measured(iteration, (predicted,), (rooms[-1] * error(iteration),))
    return rooms


@given(
    percent=st.floats(0, 400),
    room=st.integers(10**6, 10**12),
    states=st.integers(0, 10**12),
    seed=st.integers(0, 2**32),
    spread=st.floats(0, 0.05),
)
@settings(max_examples=60)
def test_a_steady_error_is_learnt_once(percent, room, states, seed, spread) -> None:
    """What may be predicted shrinks by the error, and stays there."""
    largest, noise = 1 + percent / 100, Random(seed)
    ours = MemoryBudget((room + states,), (states,))
    rooms = learn(ours, lambda _: largest * (1 - spread * noise.random()), 1000)
    assert rooms[-1] >= room / largest * 0.999
    assert rooms[-1] * largest <= room * (1 + spread) * 1.011
    assert len(ours.events) < 100


def test_repeated_failures_cut_more_each_time_and_are_not_learnt_twice() -> None:
    """A stage that holds 3.4 times what is predicted, on a device of 1000 bytes."""
    assert [round(cut(tried), 3) for tried in range(1, 6)] == [0.9, 0.81, 0.656, 0.5, 0.5]
    ours, error, tried = MemoryBudget((1e6,), (0.0,)), 3.4, 0
    while (held := error * ours.planned_bytes[0]) > 1000:
        tried += 1
        ours.failed(1, 0, 1000, "F1", tried)
    assert tried == 4
    assert ours.device_bytes == (950.0,)
    assert held > 500  # not much less than there is
    assert learn(ours, lambda _: error, 100)[-1] == ours.planned_bytes[0] == held / error


def test_nothing_is_learnt_without_need() -> None:
    """As predicted, or far from the budget."""
    ours = MemoryBudget((1000.0,), (0.0,))
    assert NEAR > 0.9
    for predicted, peak in ((900.0, 905), (500.0, 600)):
        assert ours.measured(1, (predicted,), (peak,)) == []
        assert ours.device_bytes == (1000.0,)


def test_a_resumed_run_knows_what_was_learnt_before_its_checkpoint(tmp_path) -> None:
    ours = budget()
    ours.failed(5, 0, 500, "F1")
    ours.failed(9, 1, 500, "F1")
    ours.save(str(tmp_path))
    early, late = budget(), budget()
    early.load(str(tmp_path), 6)
    late.load(str(tmp_path), 8)
    assert early.planned_bytes == (ours.planned_bytes[0], 1000.0)
    assert late.device_bytes == ours.device_bytes
    fresh = MemoryBudget((1.0,), (0.0,))  # another number of stages
    fresh.load(str(tmp_path), 8)
    assert fresh.device_bytes == (1.0,)


def test_what_was_learnt_behind_the_checkpoint_is_learnt_again_in_time(tmp_path) -> None:
    ours = budget()
    ours.failed(5, 0, 500, "F1")
    ours.measured(8, (950.0, 900.0), (0, 990))
    ours.save(str(tmp_path))
    again = budget()
    again.load(str(tmp_path), 3)  # resumed where iteration 4 is the next
    assert again.device_bytes == (1000.0, 1000.0)
    # Iteration 4 tells the same as it told then; from 5 on stage 0 has less.
    assert [event.iteration for event in again.measured(4, (900.0, 900.0), (10, 10))] == [5]
    assert again.device_bytes == (ours.device_bytes[0], 1000.0)
    # A near miss of an iteration that had none then is not learnt: the next plans would differ.
    assert again.measured(6, (900.0, 900.0), (10, 990)) == []
    again.save(str(tmp_path))
    assert (tmp_path / BUDGET_FILE).read_text().count("iteration") == 2
    # What is lower by now, because memory ran out on the way, is not raised.
    again.failed(7, 1, 300, "F2")
    (event,) = again.measured(8, (950.0, 900.0), (0, 10))
    assert event.correction == ours.corrections[1] == 1.1
    assert again.device_bytes == (ours.device_bytes[0], 285.0)
    assert again.measured(9, (950.0, 240.0), (0, 284)) != []


def test_what_experts_hold_is_learnt_before_memory_is_short(tmp_path) -> None:
    """A factor on that part of the memory, kept and replayed; never beyond all tokens on one
    device; what it does not explain is the prediction's error as ever."""
    ours = MemoryBudget((1000.0, 1000.0), (100.0, 0.0), most=4.0)

    def nobody_asks() -> list[float]:
        raise AssertionError("held what was predicted")

    assert ours.measured(3, (500.0, 300.0), (400, 300), nobody_asks) == []
    # Stage 1 held 60 more than 300; its experts' share of tokens, once more, would be 200.
    (event,) = ours.measured(4, (500.0, 300.0), (400, 360), lambda: [150.0, 200.0])
    assert (event.iteration, event.rank, event.routing) == (5, 1, 1.3)
    assert event.correction == 1 and ours.planned_bytes == ours.device_bytes
    assert Event.parse(str(event)) == event and "routing 1.300000 experts of a device" in str(event)
    # Planned for that, the same excess says nothing new.
    assert ours.measured(5, (530.0, 360.0), (430, 360), nobody_asks) == []
    # All tokens on one device explain 4 times as much and no more: the rest is the prediction's.
    learnt = ours.measured(6, (500.0, 100.0), (400, 990), lambda: [150.0, 20.0])
    assert [one.routing for one in learnt] == [4.0, 1.0] and ours.routing == 4
    assert learnt[1].correction == pytest.approx(990 / (100 + 2.7 * 20), rel=1e-5)
    ours.save(str(tmp_path))
    again = MemoryBudget((1000.0, 1000.0), (100.0, 0.0), most=4.0)
    again.load(str(tmp_path), 4)
    assert again.routing == 1.3
    again.measured(6, (500.0, 300.0), (0, 0))
    assert again.routing == 4 and again.corrections == ours.corrections
    # Where nobody shares experts there is nothing to learn.
    alone = MemoryBudget((1000.0,), (0.0,))
    assert alone.measured(4, (300.0,), (360,), nobody_asks) == []


def test_a_damaged_file_is_named_with_its_line(tmp_path) -> None:
    (tmp_path / BUDGET_FILE).write_text(
        "pipeline ranks 2\niteration 1 pipeline rank 0 budget_bytes 5 correction 1.000000 why\nno\n"
    )
    with pytest.raises(ValueError, match=rf"{BUDGET_FILE}, line 3: 'no' .* delete the file: "):
        budget().load(str(tmp_path), 9)


# ------------------------------------------------------------------ drift


def report(seconds: float, busy: tuple[float, ...], expected: tuple[float, ...]):
    return IterationReport(
        tuple(
            RankReport(0, rank, 0.0, seconds, mine, 0.0, 1, predicted)
            for rank, (mine, predicted) in enumerate(zip(busy, expected, strict=True))
        )
    )


def test_drift_is_told_once_and_when_it_is_over() -> None:
    drift = Drift()
    told = [drift.see(1.0, report(1.3, (1.0,), (1.0,))) for _ in range(RECENT + 3)]
    assert [bool(words) for words in told] == [False] * (RECENT - 1) + [True] + [False] * 3
    assert (
        f"took +30% against what was predicted (median; the band is {BAND:.0%}): "
        "plans are made for another speed; measure this device" in told[RECENT - 1][0]
    )
    assert drift.alarmed
    back = [drift.see(1.0, report(1.0, (1.0,), (1.0,))) for _ in range(RECENT)]
    assert sum(map(bool, back)) == 1
    assert not drift.alarmed


def test_one_slow_iteration_is_no_drift() -> None:
    drift = Drift()
    for number in range(3 * RECENT):
        assert drift.see(1.0, report(9.0 if number % RECENT == 0 else 1.0, (1.0,), (1.0,))) == []


def test_the_slow_rank_is_named_by_what_its_work_should_take() -> None:
    drift = Drift()
    # Rank 1 has twice the work and takes three times as long as predicted; rank 0 does as told.
    told = [drift.see(3.0, report(3.0, (1.0, 6.0, 1.0), (1.0, 2.0, 1.0))) for _ in range(PATIENCE)]
    assert told[:-1] == [[]] * (PATIENCE - 1)
    (line,) = told[-1]
    assert line.startswith("slow rank: pipeline rank 1 of replica 0 takes 3.00 times what the ")
    assert "look for other programs" in line


@pytest.mark.parametrize(
    ("busy", "named"), [((1.0, 2 * 1.12), True), ((1.0, 2 * 1.05), False), ((2.0, 4.0), False)]
)
def test_a_rank_is_slow_from_a_tenth_on(busy: tuple[float, float], named: bool) -> None:
    """All slow is nobody's fault."""
    drift = Drift()
    seen = [drift.see(2.0, report(2.0, busy, (1.0, 2.0))) for _ in range(PATIENCE)]
    assert any(seen[:-1]) is False
    assert bool(seen[-1]) is named
