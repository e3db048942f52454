"""No program hangs in one queue of a device, nor in a wait for all of it; other orders do."""

from pathlib import Path
from random import Random

import pytest

from megatron_epp.ir import (
    Kind,
    Message,
    Payload,
    Plan,
    PlanError,
    Post,
    Step,
    Transfer,
    lower,
    lower_rank,
)
from megatron_epp.ir.random_plan import arbitrary_block, arbitrary_plan
from megatron_epp.planner.registry import COMPARED
from tests.ir.queue_check import hanging_waits, stuck_in_one_queue
from tests.plans import EXAMPLE, evaluation, random_place, two_ahead

GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.plan"))
HANGING = Plan.parse(EXAMPLE)


def assert_sound(plan: Plan) -> None:
    programs = lower(plan)
    assert stuck_in_one_queue(programs) == ()
    assert stuck_in_one_queue(programs, strict=True) == ()
    assert hanging_waits(programs) == ()


def of_file(path: Path) -> tuple[Plan, ...]:
    text = path.read_text()
    try:
        return (Plan.parse(text),)
    except PlanError:
        return Step.parse(text).plans


def test_planned_batches() -> None:
    """Of all pipeline planners, training and evaluation, 1 to 8 stages."""
    plans = [plan for path in GOLDEN for plan in of_file(path)]
    planners = {plan.predicted.planner for plan in plans if plan.predicted is not None}
    assert planners >= set(COMPARED)
    for plan in plans:
        assert_sound(plan)


@pytest.mark.parametrize("stages", range(2, 17))
def test_random_plans(stages: int) -> None:
    """Every third with stages on ranks of their own, the others wherever they lie."""
    for seed in range(20):  # 300 plans with vocabulary parallelism and without, and evaluations
        random = Random(seed * 16 + stages)
        lengths = [random.randint(1, 60) for _ in range(random.randint(1, 3 - stages // 8))]
        layers = [random.randint(0, 4) for _ in range(stages)]
        split = random.choice((0, 0.5, 1))
        place = random_place(stages, random) if seed % 3 else ()
        for cut in (False, True):
            plan = arbitrary_plan(
                lengths, layers, random, split_backward=split, vocabulary_parallel=cut, place=place
            )
            assert_sound(plan)
            assert_sound(evaluation(plan))


@pytest.mark.parametrize("shares_ranks", [False, True])
@pytest.mark.parametrize("vocabulary_parallel", [False, True])
def test_replicas_in_lockstep(vocabulary_parallel: bool, shares_ranks: bool) -> None:
    """Every op is a rendezvous. By one sequence for all none stands still; by a sequence of each
    replica's own most blocks do."""
    stuck, blocks = 0, 24
    for seed in range(blocks):
        random = Random(seed)
        width, stages = random.choice((2, 3)), random.choice((2, 3, 4)) + 2 * shares_ranks
        lengths = [
            [random.randint(1, 60) for _ in range(random.randint(1, 4))] for _ in range(width)
        ]
        plans = arbitrary_block(
            lengths,
            [random.randint(1, 3) for _ in range(stages)],
            random,
            split_backward=random.choice((0.0, 0.5, 1.0)),
            vocabulary_parallel=vocabulary_parallel,
            place=random_place(stages, random, fewest=2) if shares_ranks else (),
        )
        together = [lower_rank(plan, rank, plans) for plan in plans for rank in range(plan.ranks)]
        assert stuck_in_one_queue(together, replicas=width) == ()
        assert stuck_in_one_queue(together, strict=True, replicas=width) == ()
        assert hanging_waits(together, replicas=width) == ()
        alone = [program for plan in plans for program in lower(plan)]
        stuck += stuck_in_one_queue(alone, strict=True, replicas=width) != ()
    assert stuck > blocks / 2


# ------------------------------------------------------------------ what does hang


def test_two_receives_ahead_hang_in_one_queue() -> None:
    """Stage 0 posts the gradients of chunks 1 and 0 before it asks for F0; the second waits for
    the first, and F0 stands behind it."""
    programs = two_ahead(HANGING)
    stuck = stuck_in_one_queue(programs)
    assert [str(programs[stage][index]) for stage, index in stuck] == ["POST:B0<1", "POST:F1<0"]


def test_two_receives_ahead_hang_in_a_wait_for_the_device() -> None:
    programs = two_ahead(HANGING)
    hanging = [f"{stage} {programs[stage][index]}" for stage, index in hanging_waits(programs)]
    # Until stage 0 has sent chunks 0 and 1, the gradients that it has posted cannot come; what
    # stage 1 has posted needs nothing of it.
    assert hanging == ["0 POST:B1<1", "0 POST:B0<1", "0 F0", "0 SEND:F0>1", "0 F1"]


def test_a_receive_posted_before_its_cause_hangs_a_wait() -> None:
    """One receive, moved to the front, is enough."""
    programs = list(lower(HANGING))
    post = next(op for op in programs[0] if isinstance(op, Post))
    programs[0] = (post, *(op for op in programs[0] if op != post))
    assert stuck_in_one_queue(programs) == ()
    assert stuck_in_one_queue(programs, strict=True) != ()
    assert hanging_waits(programs) == tuple((0, index) for index in range(4))


def test_messages_of_both_ways_share_a_stream() -> None:
    """H of two stages goes to and fro in one group: rank 0 posts its next hidden states before it
    has sent what the last ones became, which then waits behind them."""
    there, back = (Message(Payload.HEAD, chunk, 1, 0) for chunk in (0, 1))
    between = Message(Payload.HEAD, 0, 0, 1)
    first = (Post(there), Post(back), Transfer(Kind.SEND, between), Transfer(Kind.RECEIVE, there))
    last = (
        Transfer(Kind.SEND, there),
        Post(between),
        Transfer(Kind.RECEIVE, between),
        Transfer(Kind.SEND, back),
    )
    assert stuck_in_one_queue((first, last)) != ()
    with pytest.raises(ValueError, match="programs that never end"):
        hanging_waits((first, last))
    in_order = (Post(there), Transfer(Kind.SEND, between), Post(back))
    assert stuck_in_one_queue((in_order, last)) == ()
    assert hanging_waits((in_order, last)) == ()


def test_programs_that_never_end_are_named() -> None:
    programs = [tuple(reversed(program)) for program in lower(HANGING)]
    with pytest.raises(ValueError, match="programs that never end"):
        hanging_waits(programs)
