"""Orders of micro-batches and slices: valid, within memory, and faster where that is to be had."""

from dataclasses import replace
from itertools import pairwise, permutations
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_epp.ir import KEEP, KIND_CODE, Chunk, Kind, Op, Plan, PlanError, Span, Timed, check
from megatron_epp.mcore.loops.slice_stage import groups_of
from megatron_epp.planner.calls.call_cost import (
    CallChunks,
    features,
    guessed_rates,
    guessed_token_bytes,
    token_table,
)
from megatron_epp.planner.calls.call_options import CallOptions, bytes_of_1f1b
from megatron_epp.planner.calls.group_order import (
    OrderedGroups,
    best_order,
    call_order,
    flow_seconds,
    forward_order,
    problem_of_call,
)
from megatron_epp.planner.calls.stage_seconds import SELDOM, StageSeconds
from megatron_epp.planner.order.problem import ScheduleProblem
from tests.planner.calls.one_replica import call_plan

RATES = np.array([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
CURVED = np.array([[1.0, 0.01, 8.0], [2.0, 0.02, 8.0], [1.0, 0.01, 8.0], [1.0, 0.01, 8.0]])


def rates(stages: int, one: np.ndarray = RATES) -> np.ndarray:
    return np.stack([one] * stages)


def unsliced_plan(
    tokens: list[int],
    layers: tuple[int, ...],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
) -> Plan:
    """The plan of micro-batches of one document each, which are not cut."""
    uncut = replace(options, cut=False)
    return call_plan([(count,) for count in tokens], layers, rates_SK3, uncut, forward_only)


def problem(
    tokens: list[int], stages: int, room: np.ndarray | float = np.inf, one: np.ndarray = RATES
) -> ScheduleProblem:
    """Whole micro-batches, each one document."""
    call = CallChunks.of([[[(number, 0, count)]] for number, count in enumerate(tokens)], tokens)
    budget = np.broadcast_to(np.asarray(room, float), (stages,))
    return problem_of_call(call, token_table(call, rates(stages, one)), budget)


def given(tokens: list[int], stages: int, one: np.ndarray = RATES) -> OrderedGroups:
    return call_order(problem(tokens, stages, one=one), ones(tokens))


def ones(tokens: list[int]) -> np.ndarray:
    return np.ones(len(tokens), dtype=np.int64)


def held(orders: tuple[tuple[Op, ...], ...], tokens: list[int]) -> list[int]:
    """The most tokens between F and B (or I) on every stage."""
    most = []
    for order in orders:
        now = peak = 0
        for op in order:
            sign = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1}.get(op.kind, 0)
            now += sign * tokens[op.chunk]
            peak = max(peak, now)
        most.append(peak)
    return most


def test_the_callers_order_is_megatrons_1f1b() -> None:
    orders = given([5, 5, 5, 5], 2).ops(ones([5, 5, 5, 5]))
    assert [" ".join(map(str, order)) for order in orders] == [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_found_orders_run_and_hold_no_more(stages, seed) -> None:
    random = Random(seed)
    tokens = [random.randint(10, 1000) for _ in range(random.randint(3, 12))]
    held_by_1f1b = bytes_of_1f1b(tokens, stages)
    first = given(tokens, stages)
    assert held_by_1f1b.tolist() == held(first.ops(ones(tokens)), tokens)
    within = problem(tokens, stages, held_by_1f1b)
    found = best_order(within, ones(tokens), split=False, reorder=True, ops=60_000)
    assert found is not None
    most = held_by_1f1b
    assert all(a <= b for a, b in zip(held(found.ops(ones(tokens)), tokens), most, strict=True))
    assert found.seconds <= first.seconds * (1 + 1e-9)
    plan = unsliced_plan(tokens, (1,) * stages, rates(stages), CallOptions(), False)
    check(plan)
    assert max(held(plan.orders, tokens)) <= held_by_1f1b[0]


def test_a_better_order_is_found() -> None:
    """Large and small by turns leave stages waiting for each other."""
    tokens = [100, 400, 100, 300, 100, 200, 100, 350]
    plan = unsliced_plan(tokens, (1,) * 4, rates(4), CallOptions(split=False), False)
    first = given(tokens, 4)
    assert plan.predicted is not None and plan.predicted.seconds < 0.9 * first.seconds
    assert plan.orders[0] != first.ops(ones(tokens))[0]


def test_splitting_fills_the_gaps() -> None:
    tokens = [100] * 4
    whole = unsliced_plan(tokens, (1,) * 4, rates(4), CallOptions(split=False), False)
    split = unsliced_plan(tokens, (1,) * 4, rates(4), CallOptions(had_bytes=800.0), False)
    assert split.splits_backward and not whole.splits_backward
    assert split.predicted.seconds < 0.95 * whole.predicted.seconds


def test_without_gain_the_order_is_the_callers() -> None:
    plan = unsliced_plan([7] * 5, (1, 1), rates(2), CallOptions(split=False), False)
    assert plan.orders == given([7] * 5, 2).ops(ones([7] * 5))


def test_freedom_is_kept_to() -> None:
    tokens = [100, 100, 100, 1000]
    fixed = unsliced_plan(tokens, (1, 1), rates(2), CallOptions(False, False), False)
    assert [op.chunk for op in fixed.orders[0] if op.kind is Kind.FORWARD] == [0, 1, 2, 3]
    assert not fixed.splits_backward


def test_a_pass_of_forwards_is_a_flow_shop() -> None:
    """An exhaustive search knows no better for two stages."""
    seconds = np.array([[5.0, 1.0, 3.0, 2.0], [1.0, 5.0, 2.0, 3.0]])
    takes = flow_seconds(seconds, forward_order(seconds))
    best = min(flow_seconds(seconds, p) for p in permutations(range(4)))
    assert takes == pytest.approx(best) and takes < flow_seconds(seconds, range(4))
    check(unsliced_plan([500, 100, 300, 200], (1, 1), rates(2), CallOptions(), True))
    same = CallOptions(reorder=False)
    kept = unsliced_plan([500, 100, 300, 200], (1, 1), rates(2), same, True)
    assert [op.chunk for op in kept.orders[0]] == [0, 1, 2, 3]


# ------------------------------------------------------------------ slices


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("forward_only", [False, True])
def test_sliced_plans_run_and_keep_to_their_micro_batches(stages, forward_only) -> None:
    random = Random(stages)
    for _ in range(4):
        lengths = [
            tuple(random.randint(1, 600) for _ in range(random.randint(1, 4)))
            for _ in range(random.randint(1, 6))
        ]
        plan = call_plan(lengths, (2,) * stages, rates(stages, CURVED), CallOptions(), forward_only)
        check(plan)
        groups_of(plan, [number for number, of in enumerate(lengths) for _ in of])


def test_a_long_document_is_cut_and_time_is_gained() -> None:
    lengths = [(200,), (200, 100), (4000,), (150,)]
    plan = call_plan(lengths, (2, 2), rates(2, CURVED), CallOptions(), False)
    cut = [chunk for chunk in plan.chunks if chunk.spans[0].tokens < 4000]
    assert len(plan.chunks) > 5 and cut
    documents = tuple(length for of in lengths for length in of)
    groups = [[[(0, 0, 200)]], [[(1, 0, 200), (2, 0, 100)]], [[(3, 0, 4000)]], [[(4, 0, 150)]]]
    call = CallChunks.of(groups, documents)
    whole = problem_of_call(call, token_table(call, rates(2, CURVED)), np.full(2, np.inf))
    assert plan.predicted.seconds < 0.8 * call_order(whole, call.sizes).seconds


def plan_of(text: str, chunks: tuple[Chunk, ...], documents: tuple[int, ...]) -> Plan:
    orders = (tuple(map(Op.parse, text.split())),)
    return Plan(documents, (1,), chunks, ((KEEP,) * len(chunks),), orders)


def test_a_loss_needs_all_forwards_of_its_micro_batch() -> None:
    chunks = (Chunk((Span(0, 0, 4),)), Chunk((Span(1, 0, 4),)))
    late = plan_of("F0 B0 F1 B1", chunks, (4, 4))
    assert groups_of(late, (0, 1)) == (0, 1)
    with pytest.raises(PlanError, match="stage 0 at B0: the loss of micro-batch 0 lacks 1 forw"):
        groups_of(late, (0, 0))
    both = plan_of("F0 B0", (Chunk((Span(0, 0, 4), Span(1, 0, 4))),), (4, 4))
    with pytest.raises(PlanError, match="chunk 0 holds documents of micro-batches 0 and 1"):
        groups_of(both, (0, 1))


# ------------------------------------------------------------------ seconds


TOKENS = [100, 200, 300, 400]
SIZES = features(TOKENS, [t * t / 2 for t in TOKENS])


def records(**milliseconds: float) -> tuple[Timed, ...]:
    """Of every micro-batch; milliseconds per token, by kind."""
    return tuple(
        Timed(0, Op(Kind(letter), chunk), 0.0, 1e-3 * takes * tokens, 0)
        for letter, takes in milliseconds.items()
        for chunk, tokens in enumerate(TOKENS)
    )


def learnt(stage: StageSeconds, letter: str) -> float:
    """Milliseconds per token, on the whole."""
    return 1e3 * float((stage.rates[KIND_CODE[Kind(letter)]] @ SIZES).sum()) / sum(TOKENS)


CONFIG = SimpleNamespace(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=1,
    num_query_groups=1,
    kv_channels=64,
    gated_linear_unit=False,
)


def test_seconds_are_learnt_from_calls() -> None:
    stage = StageSeconds(guessed_rates(CONFIG, 2, 0))
    stage.saw(SIZES, records(F=9.0, B=9.0))  # the first call: much is done for the first time
    stage.saw(SIZES, records(F=1.0))
    assert not stage.measured  # of one kind alone nothing follows
    assert (stage.rates == stage.guess).all()
    stage.saw(SIZES, records(F=1.0, B=3.0))
    assert stage.measured
    forward, backward, halves = (stage.rates[k] @ SIZES for k in (0, 1, 2))
    assert forward == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.05)
    assert backward == pytest.approx([0.3, 0.6, 0.9, 1.2], rel=0.05)
    assert halves == pytest.approx(0.52 * backward)


def test_rates_that_are_off_are_fitted_at_once() -> None:
    stage = StageSeconds(guessed_rates(CONFIG, 2, 0))
    for _ in range(4):
        stage.saw(SIZES, records(F=1.0, B=2.0))
    rates = stage.rates
    stage.saw(SIZES, records(F=1.0, B=2.02))
    assert stage.rates is rates
    for _ in range(3):  # one call alone is an outlier; the eighth would be followed by a fit anyway
        stage.saw(SIZES, records(F=1.0, B=2.6))
    assert learnt(stage, "B") == pytest.approx(2.6, rel=0.05)


def test_what_halves_take_says_nothing_of_whole_backwards() -> None:
    """Whole backwards, long not run, take what they took, as far as forwards have not changed: an
    order of halves that take longer is otherwise never given up."""
    stage = StageSeconds(guessed_rates(CONFIG, 2, 0))
    for _ in range(2):
        stage.saw(SIZES, records(F=1.0, B=2.0))
    for _ in range(SELDOM):
        stage.saw(SIZES, records(F=1.5, I=2.5, W=1.5))
    assert learnt(stage, "B") == pytest.approx(3.0, rel=0.05)
    assert learnt(stage, "I") == pytest.approx(2.5, rel=0.05)
    for _ in range(SELDOM):
        stage.saw(SIZES, records(F=1.5, B=2.0))
    assert learnt(stage, "B") == pytest.approx(2.0, rel=0.05)
    assert learnt(stage, "W") == pytest.approx(1.5, rel=0.05)


def test_a_job_holds_no_more_than_it_would_by_1f1b() -> None:
    """Every rank may hold what the fullest would have in this call or an earlier one."""
    tokens = [10, 1000, 10, 10, 10, 10]
    most = bytes_of_1f1b(tokens, 3)
    assert most.tolist() == [1020, 1010, 1000]
    assert bytes_of_1f1b(tokens, 3, (1.0, 1.0, 1.5)).tolist() == [1020, 1010, 1500]
    assert bytes_of_1f1b([7], 3).tolist() == [7, 7, 7]
    assert [each.tolist() for each in CallOptions().budgets(most)] == [
        [1020, 1010, 1000], [1020] * 3
    ]  # fmt: skip
    had = CallOptions(had_bytes=2040.0)  # twice of this call's
    assert [each.tolist() for each in had.budgets(most)][-1] == [2040] * 3
    plain, roomy = (
        unsliced_plan(tokens, (1,) * 3, rates(3), CallOptions(had_bytes=had), False)
        for had in (0.0, 2040.0)
    )
    assert held(roomy.orders, tokens) > held(plain.orders, tokens)
    assert roomy.predicted.seconds < plain.predicted.seconds


@pytest.mark.everything
def test_more_memory_is_never_predicted_worse() -> None:
    """A search within a larger budget goes on from the best within smaller ones."""
    random, stages, gained = Random(0), 3, 0
    for case in range(4):
        tokens = [random.choice((30, 200, 900)) + random.randint(0, 99) for _ in range(9)]
        taken = []
        for headroom in (0, 0.06, 0.2, 0.3, 0.5, 0.9, 1.0, 9):
            most = (1 + headroom) * float(bytes_of_1f1b(tokens, stages).max())
            options = CallOptions(split=case % 2 == 0, had_bytes=most)
            plan = unsliced_plan(tokens, (1,) * stages, rates(stages, CURVED), options, False)
            check(plan)
            taken.append(plan.predicted.seconds)
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(taken)), taken
        gained += taken[-1] < taken[0]
    assert gained >= 2


def test_logits_count_where_they_are_held() -> None:
    """The last stage holds fewer tokens, since each has its logits there besides its layers."""
    body, last = guessed_token_bytes(CONFIG, [(4, 0), (4, 1000)])
    assert last > 1.3 * body
    tokens = [100] * 8
    plan = unsliced_plan(tokens, (4, 4), rates(2), CallOptions(token_bytes=(body, last)), False)
    budget = max(200 * body, 100 * last)
    most = [
        count * each for count, each in zip(held(plan.orders, tokens), (body, last), strict=True)
    ]
    assert max(most) <= budget * (1 + 1e-9) < 200 * last
