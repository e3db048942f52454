"""Closed forms on balanced chunks: window, warm-up, recompute; and the list scheduler's clock."""

import dataclasses
import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.ir import FULL, Chunk, Kind, Op, Plan, Span, check
from megatron_epp.planner.chunks.bin_packing import longest_first
from megatron_epp.planner.chunks.chunking import Chunking, assemble
from megatron_epp.planner.chunks.params import TAPERS, ChunkingParams, build_chunks
from megatron_epp.planner.chunks.slicing import Spans, cut_each
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.compiled import B, I
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.emit_block import emit_block
from megatron_epp.planner.order.list_scheduler import Policy, Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policies, policy_of
from megatron_epp.planner.order.problem import ChunkProblems, ScheduleProblem, loads_of, rates_of
from megatron_epp.planner.order.replay import merged
from megatron_epp.planner.order.warmup import (
    constant,
    group_by_group,
    pipelines,
    shrinking_in_flight,
)
from megatron_epp.planner.recompute import ilp
from megatron_epp.planner.recompute.uniform import strict
from megatron_epp.sim.engine import OpArrays
from tests.planner.cases import LENGTHS, machine, machines, prepared, priced

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=8).map(lambda s: sorted(s, reverse=True))


def balanced(sizes: list[int], stages: int, forward: float, backward: float) -> ScheduleProblem:
    """Chunks that all take the same time, and no memory."""
    count = sum(sizes)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    group = np.repeat(np.arange(len(sizes)), sizes)
    grid = np.ones((stages, count))
    ties = np.full(count, -1)
    return ScheduleProblem(
        OpArrays(
            np.stack([forward * grid, backward * grid, backward * grid / 2, backward * grid / 2]),
            np.zeros((2, max(stages - 1, 1), count)),
            0.0,
            np.zeros((4, 2, stages, count)),
            np.zeros(stages),
            ties,
        ),
        starts[group] + starts[group + 1] - 1 - np.arange(count),
        np.repeat(starts[1:] - 1, sizes),
        np.full(stages, np.inf),
    )


def in_flight(kinds: np.ndarray) -> int:
    """The most forwards without their backward at any time of one stage."""
    return int(np.cumsum(np.where(kinds == 0, 1, -1)).max())


@given(SIZES, st.integers(1, 8))
def test_window_law_and_warm_up(sizes, stages) -> None:
    """n (F + B) + (d_p - 1)(F + B), and d_p - p + N_split in flight on every stage (eq. 7)."""
    count, longest = sum(sizes), max(sizes)
    schedule = list_schedule(
        balanced(sizes, stages, 1.0, 2.0), strict(constant(np.array(sizes), stages))
    )
    assert schedule.seconds == 3.0 * (count + stages - 1)
    for stage in range(stages):
        assert in_flight(schedule.kinds[stage]) == min(count, stages - 1 - stage + longest)


@given(SIZES, st.integers(1, 6), st.data())
def test_each_pipeline_pays_its_warm_up(sizes, stages, data) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
    schedule = list_schedule(
        balanced(sizes, stages, 1.0, 2.0), strict(pipelines(np.array(sizes), cuts, stages))
    )
    assert schedule.seconds == 3.0 * (sum(sizes) + (len(cuts) + 1) * (stages - 1))


@given(SIZES, st.integers(1, 8))
def test_a_shrinking_window_costs_no_time(sizes, stages) -> None:
    """One pipeline, no barrier, less in flight than with a constant window."""
    work = balanced(sizes, stages, 1.0, 2.0)
    in_flight_limit = shrinking_in_flight(np.array(sizes), stages)
    schedule = list_schedule(work, strict(in_flight_limit))
    assert schedule.seconds == 3.0 * (sum(sizes) + stages - 1)
    assert (in_flight_limit <= constant(np.array(sizes), stages)).all()
    assert (in_flight_limit >= group_by_group(np.array(sizes), stages)).all()


@given(SIZES, st.integers(1, 6), st.data())
def test_recompute_on_diagonals_costs_its_sum(sizes, stages, data) -> None:
    """Added time = F_hat * sum of C (eq. 17), exactly."""
    work = balanced(sizes, stages, 1.0, 2.0)
    slots = sum(sizes) + stages - 1
    layers = np.array(data.draw(st.lists(st.integers(0, 4), min_size=slots, max_size=slots)))
    added = 0.25 * ilp.broadcast_diagonals(layers, work.backward_order, stages)
    seconds = work.ops.seconds.copy()
    seconds[B] += added
    longer = dataclasses.replace(work, ops=work.ops._replace(seconds=seconds))
    in_flight_limit = strict(constant(np.array(sizes), stages))
    plain, recomputing = (
        list_schedule(work, in_flight_limit),
        list_schedule(longer, in_flight_limit),
    )
    assert recomputing.seconds - plain.seconds == pytest.approx(0.25 * layers.sum(), abs=1e-9)


@given(LENGTHS, machines(), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_list_scheduler_tells_the_simulators_time(lengths, cost, seed) -> None:
    """Any policy: the plan that comes out passes check, and plays as long as it was said to."""
    random = Random(seed)
    batch = SortedBatch.of(lengths)
    rates = rates_of(cost)
    recipe = ChunkingParams(random.uniform(1, 40), random.uniform(0.5, 2), random.randint(-1, 2))
    recipe = dataclasses.replace(
        recipe,
        front=random.randrange(len(TAPERS)),
        back=random.randrange(len(TAPERS)),
        reverse=random.random() < 0.3,
    )
    chunking = build_chunks(recipe, batch.lengths, rates, 50_000)
    loads = loads_of(chunking, batch.lengths)
    grid = np.array(
        [[random.randint(0, n) for _ in range(chunking.count)] for n in cost.layout.layers], float
    )
    work = ChunkProblems(cost, chunking, loads).of({(0, FULL): grid})
    in_flight_limit = shrinking_in_flight(chunking.sizes, cost.layout.stages)
    for split in (False, True):
        style = random.choice(list(policies(split, many=True)))
        schedule = list_schedule(work, policy_of(style, work, in_flight_limit))
        draft = Draft(chunking, {(0, FULL): grid}, schedule.kinds, schedule.chunks)
        (planned,) = emit_block("test", batch, draft, cost, Options()).planned
        assert planned.seconds == pytest.approx(schedule.seconds, rel=1e-12)
        room = np.array(planned.peak_bytes) - np.array(cost.memory.states_bytes)
        assert room == pytest.approx(schedule.peak_bytes, rel=1e-9, abs=4)


def _starts(schedule: Schedule) -> dict[tuple[int, int, int], float]:
    """The start of every op, by stage, kind and chunk; a B counts as an I."""
    rows = zip(
        schedule.kinds.tolist(), schedule.chunks.tolist(), schedule.start.tolist(), strict=True
    )
    return {
        (stage, I if kind == B else kind, chunk): start
        for stage, row in enumerate(rows)
        for kind, chunk, start in zip(*row, strict=True)
        if kind >= 0
    }


@given(LENGTHS, machines(), st.sampled_from((0.0, 0.1)))
@settings(max_examples=20, deadline=None)
def test_no_backward_is_split_for_nothing(lengths, cost, price) -> None:
    """Where W stands right after I and nobody waits for the gradient, a B delays no op, saves the
    price and holds no more; on the first stage nobody ever waits."""
    cost = priced(cost, price)
    batch, chunking, loads, work, in_flight_limit = prepared(cost, lengths, 12)
    style = PolicyParams(strict=True, split=True, held=0.0, patience=1.0)
    schedule = list_schedule(work, policy_of(style, work, in_flight_limit))
    halves = Draft(chunking, {}, schedule.kinds, schedule.chunks)
    shorter = merged(work, schedule)
    apart, together = (
        emit_block("test", batch, draft, cost, Options()).planned[0]
        for draft in (halves, dataclasses.replace(halves, kinds=shorter.kinds))
    )
    assert together.seconds == pytest.approx(shorter.seconds)
    assert (together.plan.orders == apart.plan.orders) == (not (shorter.kinds == B).any())
    assert together.seconds <= apart.seconds * (1 + 1e-9)
    assert all(m <= a for m, a in zip(together.peak_bytes, apart.peak_bytes, strict=True))
    before, now = _starts(schedule), _starts(shorter)
    assert all(now[op] <= before[op] * (1 + 1e-9) for op in now)
    for one, next_op in itertools.pairwise(together.plan.orders[0]):
        assert (one.kind, next_op.kind) != (Kind.INPUT, Kind.WEIGHT) or one.chunk != next_op.chunk
    dearer = priced(cost, -0.5)  # where B takes longer than both, they stay apart
    work = ChunkProblems(dearer, chunking, loads).of({})
    assert merged(work, schedule) is schedule


@given(LENGTHS, machines(), st.floats(1, 60), st.sampled_from((1, 16, 64)))
@settings(max_examples=60, deadline=None)
def test_chunks_hold_every_token_once(lengths, cost, chunks, multiple) -> None:
    """And the slices of a document lie in order, in neighbouring chunks."""
    batch = SortedBatch.of(lengths)
    chunking = build_chunks(ChunkingParams(chunks), batch.lengths, rates_of(cost), 20_000, multiple)
    orders = ((*(Op(Kind.FORWARD, c) for c in range(chunking.count)),),)
    plan = Plan(
        batch.documents, (1,), chunking.ir_chunks(batch.names), (("k",) * chunking.count,), orders
    )
    check(plan)
    assert tuple(chunk.tokens for chunk in plan.chunks) == tuple(chunking.tokens.tolist())
    assert tuple(chunk.pairs for chunk in plan.chunks) == tuple(chunking.pairs.tolist())
    assert sorted(chunking.backward.tolist()) == list(range(chunking.count))


def test_slices_take_equal_time_and_get_shorter() -> None:
    rates = rates_of(machine())
    cuts = cut_each(
        np.array([90_000]), rates.document_seconds(np.array([90_000]))[0] / 6, rates, 10**9
    )
    stops = [*cuts.slices.stop.tolist(), *cuts.tails.stop.tolist()]
    starts = [*cuts.slices.start.tolist(), *cuts.tails.start.tolist()]
    spans = [Span(0, a, b) for a, b in zip(starts, stops, strict=True)]
    assert len(spans) == 6
    seconds = [rates.seconds(span.tokens, span.pairs) for span in spans]
    assert max(seconds) - min(seconds) < 1e-3 * max(seconds)
    assert all(a.tokens > b.tokens for a, b in itertools.pairwise(spans))


def test_groups_can_be_arranged() -> None:
    lengths = np.array([9_000, 8_000, 500, 400, 300])
    rates = rates_of(machine())
    cuts = cut_each(lengths, rates.document_seconds(np.array([3_000]))[0], rates, 10**9)
    chunking = assemble(cuts, *longest_first(cuts, rates, 3, 1e9), rates)
    order = np.arange(chunking.groups)[::-1]
    turned = chunking.arranged(order)
    assert isinstance(turned, Chunking) and isinstance(turned.spans, Spans)
    names = range(len(lengths))
    groups = [
        chunking.ir_chunks(names)[a:b]
        for a, b in zip(chunking.starts, chunking.starts[1:], strict=False)
    ]
    flat: list[Chunk] = [chunk for group in reversed(groups) for chunk in group]
    assert list(turned.ir_chunks(names)) == flat


def test_a_policy_that_fits_stays_within_the_budget() -> None:
    """Memory holds forwards back where greed would exceed the budget."""
    cost = machine(pp=4, room_gib=6)
    _, chunking, _, work, _ = prepared(cost, [6_000] * 60, 60.0)
    everything = np.full((4, chunking.count), chunking.count)
    greedy = Policy(group_by_group(chunking.sizes, 4), everything, everything)
    schedule = list_schedule(work, greedy)
    assert schedule.over_bytes == 0
    loose = dataclasses.replace(work, headroom_bytes=np.full(4, 1e15))
    assert in_flight(list_schedule(loose, greedy).kinds[0]) > in_flight(schedule.kinds[0])
