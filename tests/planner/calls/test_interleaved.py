"""Plans of interleaved calls: Megatron's own order, and orders of whole micro-batches that pay."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from megatron_epp.ir import Kind, Table, check
from megatron_epp.planner.calls.call_cost import CallChunks, token_table
from megatron_epp.planner.calls.call_options import (
    AS_CALLED,
    PLANNED,
    CallOptions,
    bytes_of_1f1b,
)
from megatron_epp.planner.calls.call_plan import unsliced_plan
from megatron_epp.planner.calls.group_order import problem_of_call
from megatron_epp.planner.calls.interleaved import call_turns
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import warm_up_policy
from megatron_epp.planner.order.problem import ScheduleProblem
from megatron_epp.sim.play import play
from tests.planner.calls.test_group_order import CURVED, RATES, extents, rates


@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (2, 3), (4, 2), (4, 3)])
def test_the_given_order_is_that_of_megatrons_schedule(ranks: int, parts: int) -> None:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    for chunks in (ranks, 3 * ranks):
        order = get_schedule_table(chunks, parts, ranks)
        for rank, ran in enumerate(call_turns(chunks, ranks, ranks * parts, False)):
            forwards = [(chunk, stage // ranks) for kind, chunk, stage in ran if kind == F]
            backwards = [(chunk, stage // ranks) for kind, chunk, stage in ran if kind == B]
            assert forwards == list(order)
            assert backwards == [(chunk, parts - 1 - part) for chunk, part in order]
            kinds = [kind for kind, *_ in ran]
            warm = min(2 * (ranks - rank - 1) + (parts - 1) * ranks, chunks * parts)
            steady = chunks * parts - warm
            assert kinds == [F] * warm + [F, B] * steady + [B] * warm


def test_any_number_of_micro_batches_runs() -> None:
    for ranks, parts in ((2, 2), (4, 3), (8, 2)):
        stages = ranks * parts
        for count in range(1, 2 * ranks + 2):
            for forward_only in (False, True):
                made = unsliced_plan(
                    extents([10] * count), (1,) * stages, rates(stages), CallOptions(False, False),
                    forward_only, in_turn(ranks, stages),
                )  # fmt: skip
                check(made)
                assert made.predicted is not None and made.predicted.planner == AS_CALLED


@pytest.mark.parametrize("split", [False, True])
def test_planned_orders_hold_no_more_and_take_less(split: bool) -> None:
    random, planned = Random(1), 0
    for _ in range(12):
        ranks, parts = random.choice(((2, 2), (4, 2), (2, 3)))
        stages = ranks * parts
        tokens = [
            random.choice((100, 300, 1000, 4000)) for _ in range(random.randint(2, 6 * ranks))
        ]
        shapes, layers = extents(tokens), (1,) * stages
        same = CallOptions(False, False)
        place = in_turn(ranks, stages)
        given = unsliced_plan(shapes, layers, rates(stages), same, False, place)
        made = unsliced_plan(shapes, layers, rates(stages), CallOptions(True, split), False, place)
        check(made)
        halved = any(op.kind is Kind.WEIGHT for order in made.orders for op in order)
        assert split or not halved
        table = _table(shapes, stages)
        peaks = [play(plan, table).peak_bytes for plan in (given, made)]
        assert max(peaks[1]) <= max(peaks[0]) * (1 + 1e-9)
        assert given.predicted is not None and made.predicted is not None
        if made.predicted.planner == PLANNED:
            planned += 1
            assert made.predicted.seconds < 0.985 * given.predicted.seconds
            assert made.predicted.seconds == pytest.approx(play(made, table).seconds)
        else:
            assert made == given
    assert planned >= 3, planned


def in_turn(ranks: int, stages: int) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(stages))


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_micro_batches_do_not_lose_to_zb_v(ranks: int) -> None:
    """Seconds alike, and what 1F1B holds on its fullest rank: on stages in a V never, on one stage
    a rank not on the whole."""
    random, place = Random(ranks), (*range(ranks), *reversed(range(ranks)))
    half, layers, shares = CURVED / 2, (1,) * 2 * ranks, (0.5,) * 2 * ranks
    ones, others, fitted = 0.0, 0.0, 0
    for _ in range(8):
        tokens = [random.choice((100, 300, 1000)) for _ in range(random.randint(4, 16))]
        shapes, held = extents(tokens), bytes_of_1f1b(tokens, ranks)
        problem = replace(_problem(tokens, rates(2 * ranks, half), shares, held), place=place)
        seconds = min(_zb_v(problem), default=None)
        of_v = CallOptions(token_bytes=shares)
        made = unsliced_plan(shapes, layers, rates(2 * ranks, half), of_v, False, place)
        check(made)
        one = unsliced_plan(shapes, (2,) * ranks, rates(ranks, CURVED), CallOptions(), False)
        assert made.predicted is not None and one.predicted is not None
        own = unsliced_plan(
            shapes, layers, rates(2 * ranks, half), CallOptions(False, False), False, place
        )
        budget = np.max(play(own, _table(shapes, 2 * ranks, half)).peak_bytes) / 2
        for each in _zb_v(replace(problem, headroom_bytes=np.full(ranks, budget))):
            assert made.predicted.seconds <= each * (1 + 1e-9)
        if seconds is not None:
            ones, others, fitted = ones + one.predicted.seconds, others + seconds, fitted + 1
    assert fitted >= 2 and ones <= others


def _problem(
    tokens: list[int], rates_SK3: np.ndarray, shares: tuple[float, ...], held: np.ndarray
) -> ScheduleProblem:
    call = CallChunks.of([[[(n, 0, count)]] for n, count in enumerate(tokens)], tokens)
    table = token_table(call, rates_SK3, shares)
    return problem_of_call(call, table, np.full(len(held), held.max()))


def _zb_v(problem: ScheduleProblem) -> list[float]:
    """Seconds of its orders that fit, as the planner of that name has them."""
    ranks = 1 + max(problem.place)
    warm, split = np.full(ranks, 2 * ranks), {"split": True, "deep": True}
    policies = [
        warm_up_policy(problem.place, problem.chunks, warm, **split, strict=strict)
        for strict in (True, False)
    ]
    played = [list_schedule(problem, policy) for policy in policies]
    return [each.seconds for each in played if each.over_bytes <= 0]


def test_passes_of_forwards_run_on_stages_in_a_v() -> None:
    place = (0, 1, 1, 0)
    plan = unsliced_plan(extents([10, 30, 20]), (1,) * 4, rates(4), CallOptions(), True, place)
    check(plan)
    assert plan.predicted is not None and plan.predicted.planner == AS_CALLED


def _table(shapes: list[MicrobatchShape], stages: int, one: np.ndarray = RATES) -> Table:
    tokens = [shape.tokens for shape in shapes]
    call = CallChunks.of([[[(number, 0, count)]] for number, count in enumerate(tokens)], tokens)
    return token_table(call, rates(stages, one))
