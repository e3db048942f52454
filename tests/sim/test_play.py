"""The simulator against an independent replay, closed forms, and its own promises."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cli.simulate import bubble_text
from megatron_epp.ir import (
    COMPUTE,
    Chunk,
    Deadlock,
    Item,
    Kind,
    Op,
    Payload,
    Plan,
    PlanError,
    Span,
    Table,
    check,
    format_records,
    parse_records,
    rules_for,
    slices_of,
)
from megatron_epp.sim.engine import run
from megatron_epp.sim.inputs import op_arrays, orders_of
from megatron_epp.sim.play import BUSY, START, IdleTail, Wait, play
from megatron_epp.sim.rule_arrays import needs_for
from tests.plans import EXAMPLE, any_plans, evaluation, random_table, reordered
from tests.sim.replay import Replay


def agrees(plan: Plan, table: Table) -> None:
    played, replay = play(plan, table), Replay(plan, table)
    assert {(r.stage, r.op): r.start for r in played.records} == replay.start
    assert {(r.stage, r.op): r.stop for r in played.records} == replay.stop
    assert {(r.stage, r.op): r.peak_bytes for r in played.records} == replay.op_peak
    assert played.seconds == replay.seconds
    assert played.peak_bytes == tuple(replay.peak)
    assert played.left_bytes == (0.0,) * plan.ranks
    assert not any(replay.alive)
    flights = {
        (f.message.payload, f.message.chunk, f.message.source, f.ready, f.depart, f.arrive)
        for f in played.flights
    }
    assert flights == set(replay.sent)
    assert len(flights) == len(played.flights)


@given(any_plans(), st.integers(0, 2**32), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_agrees_with_the_replay_exactly(plan: Plan, seed: int, links: bool, whole: bool) -> None:
    """Times to the last bit, peaks to the byte; ties (whole seconds, zeros) included."""
    agrees(plan, random_table(plan, seed, links, whole))


@given(any_plans(), st.integers(0, 2**32))
def test_evaluation_agrees_with_the_replay(plan: Plan, seed: int) -> None:
    agrees(evaluation(plan), random_table(plan, seed))


@given(any_plans(), st.integers(0, 2**32), st.data())
def test_play_refuses_what_check_refuses(plan: Plan, seed: int, data: st.DataObject) -> None:
    """A shuffled order either runs in both or is refused by both in the same words."""
    rank = data.draw(st.integers(0, plan.ranks - 1))
    ran = [list(order) for order in plan.rank_orders]
    ran[rank] = data.draw(st.permutations(ran[rank]))
    if data.draw(st.booleans()):
        ran[rank].pop(0)
    plan = reordered(plan, ran)
    try:
        check(plan)
    except PlanError as error:
        with pytest.raises(type(error)) as caught:
            play(plan, random_table(plan, seed))
        assert str(caught.value) == str(error)
    else:
        agrees(plan, random_table(plan, seed))


# --- closed forms ---------------------------------------------------------------------------------


def even_table(plan: Plan, forward: float, backward: float, recompute=None) -> Table:
    """Chunks of equal time, links of none; one byte of activations a chunk."""
    shape = (plan.stages, len(plan.chunks))
    ones = np.ones(shape)
    seconds = {
        Kind.FORWARD: forward * ones,
        Kind.BACKWARD: backward * ones,
        Kind.INPUT: backward / 2 * ones,
        Kind.WEIGHT: backward / 2 * ones,
        Kind.HEAD: forward / 4 * ones,
        Kind.HEAD_WEIGHT: forward / 4 * ones,
    }
    none = np.zeros(shape)
    documents = np.zeros((plan.stages, len(plan.documents)))
    return Table(
        seconds=seconds,
        recompute_seconds=none if recompute is None else recompute,
        comm_seconds=dict.fromkeys(COMPUTE, none),
        link_seconds={p: none if p is Payload.HEAD else none[1:] for p in Payload},
        link_latency_seconds=0.0,
        held_bytes={
            Item.ACTIVATIONS: ones,
            Item.WEIGHT_INPUTS: none,
            Item.HEAD_INPUTS: none,
            Item.KV: documents,
            Item.KV_GRADIENTS: documents,
        },
        workspace_bytes=dict.fromkeys(COMPUTE, none),
        resident_bytes=[0.0] * plan.stages,
    )


def one_f_one_b(stages: int, slices: list[int], window: int | None = None) -> Plan:
    """1F1B over chunks of one token; slices[d] of document d; longest first.

    Stage p (from 1) holds d_p - p + N_split chunks: InfiniPipe's eq. 7.
    """
    assert slices == sorted(slices, reverse=True)
    chunks, backward, first = [], [], 0
    for document, count in enumerate(slices):
        chunks += [Chunk((Span(document, i, i + 1),)) for i in range(count)]
        backward += range(first + count - 1, first - 1, -1)
        first += count
    orders = []
    for stage in range(1, stages + 1):
        held = min(len(chunks), stages - stage + (max(slices) if window is None else window))
        forwards = iter(range(len(chunks)))
        order = [Op(Kind.FORWARD, next(forwards)) for _ in range(held)]
        for chunk in backward:
            order.append(Op(Kind.BACKWARD, chunk))
            order += [Op(Kind.FORWARD, c) for c in [next(forwards, None)] if c is not None]
        orders.append(tuple(order))
    recompute = tuple(("k",) * len(chunks) for _ in range(stages))
    return Plan(tuple(slices), (1,) * stages, tuple(chunks), recompute, tuple(orders))


def test_a_window_that_is_too_small_cannot_run() -> None:
    plan = one_f_one_b(2, [3, 1], window=2)
    with pytest.raises(PlanError, match="stage 1 at B2: lacks F2 of stage 1"):
        play(plan, even_table(plan, 1, 2))
    with pytest.raises(Deadlock):
        plan = Plan.parse(
            "plan v1\ndocuments 1 1\nlayers 1 1\nchunk 0: 0[0:1]\nchunk 1: 1[0:1]\n"
            "stage 0: F0 B0 F1 B1\nstage 1: F1 B1 F0 B0\n"
        )
        play(plan, even_table(plan, 1, 2))


# --- what a played plan tells --------------------------------------------------------------------


def test_the_example_in_numbers() -> None:
    plan = Plan.parse(EXAMPLE)
    played = play(plan, even_table(plan, 1, 2))
    assert played.seconds == 12
    # stage 0: F0 F1 F2 . . B1 . B0 . . B2     stage 1: . F0 F1 B1 B0 F2 B2
    assert [bubble_text(b) for b in played.bubbles] == [
        "stage 0 idles 2.000 s before B1: waits for B1 of stage 1 (the gradient of its output)",
        "stage 0 idles 1.000 s before B2: waits for B2 of stage 1 (the gradient of its output)",
        "stage 1 idles 1.000 s before F0: waits for F0 of stage 0 (its input)",
        "stage 1 is done 2.000 s before the iteration ends",
    ]
    assert [f"{step.op}@{step.stage} {step.why}" for step in played.critical_path] == [
        f"F0@0 {START}",
        "F0@1 its input",
        f"F1@1 {BUSY}",
        f"B1@1 {BUSY}",
        f"B0@1 {BUSY}",
        f"F2@1 {BUSY}",
        f"B2@1 {BUSY}",
        "B2@0 the gradient of its output",
    ]
    assert played.idle_seconds == (3, 3)
    assert played.bubble_ratio == 0.25
    assert played.peak_bytes == (3, 2)
    assert played.memory_curve(1) == (
        (1, 1), (2, 1), (2, 2), (3, 2), (3, 2), (5, 1), (5, 1), (7, 0), (7, 1), (8, 1), (8, 1),
        (10, 0),
    )  # fmt: skip


@given(any_plans(), st.integers(0, 2**32), st.booleans())
def test_idle_time_is_explained(plan: Plan, seed: int, links: bool) -> None:
    """Bubbles and ops tile every rank; a critical path has no gap but messages in flight."""
    table = random_table(plan, seed, links)
    played = play(plan, table)
    for rank in range(plan.ranks):
        pieces = [(r.start, r.stop) for r in played.records if plan.rank_of[r.stage] == rank]
        pieces += [(b.start, b.stop) for b in played.bubbles if b.rank == rank]
        pieces = sorted(p for p in pieces if p[1] > p[0])
        assert pieces[0][0] == 0.0
        assert pieces[-1][1] == played.seconds
        assert all(a[1] == b[0] for a, b in pairwise(pieces))
        idle = sum(b.stop - b.start for b in played.bubbles if b.rank == rank)
        assert idle == pytest.approx(played.idle_seconds[rank], abs=1e-9)
    stops = {(r.stage, r.op): r.stop for r in played.records}
    for bubble in played.bubbles:
        if isinstance(bubble, Wait):
            assert stops[bubble.source, bubble.awaited] <= bubble.stop
        else:
            assert isinstance(bubble, IdleTail)
    path = played.critical_path
    assert path[0].start == 0.0 and path[0].why == START
    assert path[-1].stop == played.seconds
    for before, after in pairwise(path):
        if plan.rank_of[before.stage] == plan.rank_of[after.stage] or not links:
            assert before.stop == after.start
        else:
            assert before.stop <= after.start


@given(any_plans(), st.integers(0, 2**32))
def test_the_critical_path_is_critical(plan: Plan, seed: int) -> None:
    """Without links, its ops fill the whole iteration; making one of them longer lengthens it."""
    table = random_table(plan, seed, links=False)
    played = play(plan, table)
    path = played.critical_path
    assert sum(s.stop - s.start for s in path) == pytest.approx(played.seconds, rel=1e-12)
    step = path[seed % len(path)]
    table.seconds[step.op.kind][step.stage][step.op.chunk] += 1.0
    assert play(plan, table).seconds == pytest.approx(played.seconds + 1, rel=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (3, 3, 6), (2, 4, 6)])
def test_interleaved_1f1b_idles_a_part_as_long_as_1f1b(p: int, v: int, m: int) -> None:
    """v stages a rank in Megatron-LM's order: every rank idles (p - 1)(f + b), f and b of a stage
    that is 1/v of a rank's layers; a rank holds what its warm-up runs ahead, and one more."""
    plan = interleaved(p, v, m)
    check(plan)
    played = play(plan, even_table(plan, 1, 2))
    assert played.seconds == 3 * m * v + 3 * (p - 1)
    assert played.idle_seconds == (3.0 * (p - 1),) * p
    ahead = [2 * (p - rank - 1) + (v - 1) * p for rank in range(p)]
    assert played.peak_bytes == tuple(min(m * v, n + 1) for n in ahead)


def interleaved(p: int, v: int, m: int) -> Plan:
    orders = []
    for rank in range(p):
        # The k-th forward or backward of a rank: p micro-batches through each stage in turn.
        def op(k: int, kind: Kind, rank: int = rank) -> tuple[int, Op]:
            part, chunk = k // p % v, k // (p * v) * p + k % p
            if kind is Kind.BACKWARD:
                part = v - 1 - part
            return part * p + rank, Op(kind, chunk)

        ahead = min(m * v, 2 * (p - rank - 1) + (v - 1) * p)
        order = [op(k, Kind.FORWARD) for k in range(ahead)]
        for k in range(m * v):
            if k + ahead < m * v:
                order.append(op(k + ahead, Kind.FORWARD))
            order.append(op(k, Kind.BACKWARD))
        orders.append(order)
    stages = p * v
    ran = [place for order in orders for place in order]
    return Plan(
        (1,) * m,
        (1,) * stages,
        tuple(Chunk((Span(c, 0, 1),)) for c in range(m)),
        (("k",) * m,) * stages,
        tuple(tuple(op for where, op in ran if where == stage) for stage in range(stages)),
        place=tuple(stage % p for stage in range(stages)),
        turns=tuple(tuple(stage for stage, _ in order) for order in orders),
    )


def test_ratios_and_records() -> None:
    plan = Plan.parse(EXAMPLE)
    table = even_table(plan, 1, 2, recompute=np.full((2, 3), 0.5))
    table.comm_seconds[Kind.FORWARD] = np.full((2, 3), 0.25)
    played = play(plan, table)
    assert played.recompute_ratio == pytest.approx(6 * 0.5 / (2 * played.seconds))
    assert played.comm_ratio == pytest.approx(6 * 0.25 / (2 * played.seconds))
    busy = 6 * (1 + 2.5) / (2 * played.seconds)
    assert played.bubble_ratio == pytest.approx(1 - busy)
    assert parse_records(format_records(played.records)) == played.records


def test_a_table_without_numbers_is_refused() -> None:
    plan = Plan.parse(EXAMPLE)
    table = even_table(plan, 1, 2)
    table.seconds[Kind.FORWARD][0, 0] = np.inf
    with pytest.raises(PlanError, match="not a finite number"):
        play(plan, table)


# --- for planners ---------------------------------------------------------------------------------


def test_a_stuck_order_takes_forever() -> None:
    plan = one_f_one_b(2, [3, 1], window=2)
    table = even_table(plan, 1, 2)
    arrays = op_arrays(table, slices_of(plan), rules_for(False))
    assert run(orders_of(plan), arrays, needs_for(False)).seconds == np.inf
