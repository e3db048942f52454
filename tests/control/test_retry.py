"""Out of memory: what is repeated with less, how often, and what the last line says."""

from random import Random
from types import SimpleNamespace

import pytest

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.control.memory_budget import MemoryBudget
from megatron_epp.control.planned_steps import PlannedSteps
from megatron_epp.control.report import IterationReport, RankReport
from megatron_epp.control.retry import MOST_REPETITIONS, Attempt, Retry
from megatron_epp.ir import Kind, Op, PlanError, StageOp, Step, Timed
from megatron_epp.ir.random_plan import arbitrary_block, arbitrary_plan
from megatron_epp.runtime.executor import Failure

GROUPS = SimpleNamespace(control=SimpleNamespace(rank=lambda: 0))


class GivenOnly:
    def step(self, iteration, lengths, forward_only): ...

    def look_ahead(self, iteration, following) -> None: ...


class Learning(PlannedSteps):
    def __init__(self) -> None:
        self.budget = MemoryBudget((1000.0, 1000.0), (100.0, 100.0))
        self.narrowed = 0

    def narrow(self) -> None:
        self.narrowed += 1


def test_an_empty_chunk_fails_with_the_one_beside_it() -> None:
    """All replicas of a block give up at one op: what was too large is the largest chunk of it."""
    plans = arbitrary_block([[30], [5]], (1,), Random(4))
    step = Step(((0,), (1,)), plans, 2)
    chunk = next(c for c, held in enumerate(plans[1].chunks) if not held.spans)
    told: list[int] = []
    steps = Learning()
    steps.shrink_evaluation = told.append
    record = Timed(0, Op(Kind.FORWARD, chunk), 0.0, 1.0, 880)
    failure = Failure(Op(Kind.FORWARD, chunk), stage=0, rank=0, held_bytes=880, reason="none left")
    failed = RankReport.of(1, 0, (record,), failure=failure, block=step.block(1))
    Retry(steps, GROUPS)._evaluate_in_less(1, [RankReport.from_row(failed.row())])
    assert told == [max(plan.chunks[chunk].tokens for plan in plans) // 2] and told[0] > 0


def attempts(fails: int):
    """The first ``fails`` of them run out of memory on pipeline rank 1, in its stage 2."""
    step = Step(((0,),), (arbitrary_plan([50], (2, 2), Random(1)),))
    told: list[str] = []

    def attempt() -> Attempt:
        failure = StageOp(2, Op(Kind.FORWARD, 0)) if told.count("run") < fails else None
        told.append("run")
        reports = (
            RankReport(0, 0, 0.0, 1.0, 1.0, 0.0, 10),
            RankReport(0, 1, 0.0, 1.0, 1.0, 0.0, 10, 0.0, failure, 880 if failure else 0),
        )
        return Attempt(AcceptedStep(step.part(0), 50), (), IterationReport(reports))

    return attempt, told


def test_what_fits_at_last_is_what_counts(caplog) -> None:
    steps, (attempt, told) = Learning(), attempts(3)
    done = Retry(steps, GROUPS).run(4, False, attempt, lambda: told.append("undo"))
    assert not done.report.failures
    assert told == ["run", "undo", "run", "undo", "run", "undo", "run"]
    assert steps.narrowed == 3
    assert steps.budget.planned_bytes[0] == 1000
    rooms = [event.budget_bytes for event in steps.budget.events]
    assert rooms == [910, 910, 910]  # of the 900 for chunks nine tenths, though 880 were held
    corrections = [event.correction for event in steps.budget.events]
    assert corrections == pytest.approx([1, 1 / 0.81, 1 / 0.81 / 0.6561], abs=1e-5)
    assert [record.getMessage() for record in caplog.records] == [
        f"the iteration is repeated with less memory: {event}" for event in steps.budget.events
    ]
    for event in steps.budget.events:
        assert str(event).startswith("iteration 4 pipeline rank 1 budget_bytes 910 correction ")
        assert str(event).endswith("out of memory at F0 of stage 2, 880 bytes held for chunks")


def test_repetitions_have_an_end() -> None:
    steps, (attempt, told) = Learning(), attempts(1000)
    with pytest.raises(PlanError) as ended:
        Retry(steps, GROUPS).run(4, False, attempt, lambda: None)
    assert len(told) == MOST_REPETITIONS + 1
    assert str(ended.value).startswith(
        f"iteration 4: out of memory in all of {MOST_REPETITIONS + 1} attempts, each planned with "
        "less than the one before; the last at F0 of stage 2 on pipeline rank 1 with 8.196e-07 GiB "
        "held for chunks: "
    )
    assert "\n" not in str(ended.value)
    # What was left to plan with in the end: nobody could say that less would have been tried.
    assert steps.budget.planned_bytes[1] - 100 < 0.02 * 900


def test_given_steps_are_not_repeated() -> None:
    attempt, told = attempts(1)
    said = r"pipeline rank 1 ran out of memory at F0 of stage 2 in iteration 4, .*plan was given"
    with pytest.raises(PlanError, match=said):
        Retry(GivenOnly(), GROUPS).run(4, False, attempt, lambda: None)
    assert told == ["run"]


def test_a_report_names_the_stage_of_a_failure_and_its_rank() -> None:
    record = Timed(3, Op(Kind.FORWARD, 1), 0.0, 1.0, 880)
    failure = Failure(Op(Kind.FORWARD, 1), stage=3, rank=0, held_bytes=880, reason="none left")
    report = RankReport.of(0, 0, (record,), failure=failure)
    assert (report.rank, report.failed_op) == (0, "F1 of stage 3")
    assert RankReport.from_row(report.row()) == report
