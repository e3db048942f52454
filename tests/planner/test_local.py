"""Documents local to context-parallel ranks: chunks made for them, their cost, plans with them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.columns import WindowPairs
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import (
    ALL_RANKS,
    Chunk,
    Kind,
    Plan,
    PlanError,
    Span,
    check,
    check_ranks,
    slices_in,
)
from megatron_epp.planner.chunks.local import rank_seconds
from megatron_epp.planner.chunks.params import UNCUT, ChunkingParams, build_chunks
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import TRAINING_LEVERS, Options
from megatron_epp.planner.order.problem import loads_of
from megatron_epp.planner.registry import COMPARED, PLANNERS
from megatron_epp.planner.replicas import plan_step
from megatron_epp.sim.play import play
from tests.cost.simple_device import OLD_H100
from tests.planner.cases import LENGTHS

RATES = Rates(2e-6, 3e-10, 1e-3, exchange_seconds=5e-7)
BATCH = (30_000, 9_000, 9_000, 5_000, *[2_000] * 12, *[700] * 40, *[64] * 30)


def machine(cp: int = 8, **how) -> Cost:
    return named_cost("llama3-8b", OLD_H100, pp=4, cp=cp, zero=1, **how)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    ranks=st.sampled_from((2, 3, 8)),
    params=st.builds(
        ChunkingParams,
        chunks=st.floats(1, 40),
        cut=st.sampled_from((0.7, 1.0, 2.0, UNCUT)),
        extra_bins=st.integers(-2, 3),
        front=st.integers(0, 5),
        back=st.integers(0, 5),
        reverse=st.booleans(),
        local=st.floats(0.1, 3),
    ),
    most=st.sampled_from((4_000, 50_000, 10**9)),
    multiple=st.sampled_from((1, 2)),
)
def test_every_input_is_computed_once_and_rows_stay_within_a_stage(
    lengths, ranks, params, most, multiple
) -> None:
    lengths = sorted(lengths, reverse=True)
    multiple *= ranks
    chunking = build_chunks(params, np.array(lengths), RATES, most, multiple, ranks)
    chunks = chunking.ir_chunks(range(len(lengths)))
    slices_in(lengths, chunks)
    assert all(chunk.spans for chunk in chunks)
    assert all(span.rank < ranks for chunk in chunks for span in chunk.spans)
    # What is local is short: no spread whole document could have been.
    whole = [s for c in chunks for s in c.spans if s.tokens == lengths[s.document]]
    local = [span.tokens for span in whole if span.local]
    assert max(local, default=0) <= min((s.tokens for s in whole if not s.local), default=10**9)
    for chunk in chunks:
        if chunk.has_local:
            assert chunk.rows(ranks) <= max(most, 0) + ranks


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, cp=st.sampled_from((2, 8)), local=st.floats(0.2, 2), multiple=st.just(1))
def test_planners_and_cost_see_the_same_loads(lengths, cp, local, multiple) -> None:
    lengths = np.array(sorted(lengths, reverse=True))
    params = ChunkingParams(6.0, local=local)
    chunking = build_chunks(params, lengths, RATES, 10**9, multiple, cp)
    planned = loads_of(chunking, lengths, multiple)
    told = machine(cp).loads(chunking.ir_chunks(range(len(lengths))), lengths.tolist())
    np.testing.assert_allclose(planned.tokens, told.tokens)
    np.testing.assert_allclose(planned.pairs, told.pairs)
    window = WindowPairs(100)
    np.testing.assert_allclose(window.of_chunks(planned), window.of_chunks(told))
    assert (planned.local is None) == (told.local is None)
    if planned.local is not None and told.local is not None:
        np.testing.assert_allclose(planned.local.tokens, told.local.tokens)


def test_a_chunk_takes_what_its_slowest_rank_does_and_exchanges_what_is_spread() -> None:
    """Written out: one document spread, two local ones on rank 0, one on rank 1."""
    cost = machine(2)
    documents = (1000, 300, 200, 400)
    spans = (Span(0, 0, 1000), Span(1, 0, 300, 0), Span(2, 0, 200, 0), Span(3, 0, 400, 1))
    loads = cost.loads([Chunk(spans)], documents)
    per = cost.seconds.per(Kind.FORWARD)
    exchange = cost.seconds.exchange_per_token[Kind.FORWARD]
    rows = 1000 + 2 * 500
    pairs = spans[0].pairs + 2 * max(spans[1].pairs + spans[2].pairs, spans[3].pairs)
    expected = per[:, 0] * rows + per[:, 1] * pairs + per[:, 2] - exchange * 1000
    np.testing.assert_allclose(cost.seconds.of(Kind.FORWARD, loads)[:, 0], expected)
    assert exchange.min() > 0
    # Nothing is exchanged where all is local, and communication is nothing else here.
    whole = [dataclasses.replace(span, document=d) for d, span in enumerate(spans[1:])]
    local = cost.loads([Chunk(tuple(whole))], documents[1:])
    np.testing.assert_allclose(cost.seconds.communication(Kind.FORWARD, local), 0, atol=1e-15)
    everywhere = [dataclasses.replace(span, rank=ALL_RANKS) for span in whole]
    assert (
        cost.seconds.communication(
            Kind.FORWARD, cost.loads([Chunk(tuple(everywhere))], documents[1:])
        ).min()
        > 0
    )


def test_a_measured_profile_says_how_much_of_it_is_exchange() -> None:
    """Of a profile that was measured over two ranks, whose seconds contain it."""
    made = machine(2).layout.profile
    measured = dataclasses.replace(
        made.each_kind(
            all_to_all_bytes_per_token=0.0,
            exchange_seconds={Kind.FORWARD: 1e-9, Kind.BACKWARD: 2e-9, Kind.INPUT: 1.0},
        ),
        cp=2,
    )
    assert Profile.from_json(measured.to_json()) == measured
    cost = machine(2).replace(profile=measured, network=None)
    chunk, documents = Chunk((Span(0, 0, 500, 0), Span(1, 0, 500, 1))), (500, 500)
    everywhere = Chunk((Span(0, 0, 500), Span(1, 0, 500)))
    local, spread = (cost.loads([each], documents) for each in (chunk, everywhere))
    layers = np.array(cost.layout.layers, dtype=float)
    for kind, seconds in ((Kind.FORWARD, 1e-9), (Kind.BACKWARD, 2e-9), (Kind.WEIGHT, 0.0)):
        spared = cost.seconds.of(kind, spread) - cost.seconds.of(kind, local)
        np.testing.assert_allclose(spared[:, 0], layers * seconds * 1000, rtol=1e-6, atol=1e-15)
    # Never more than what the layer takes for a token.
    most = measured.layer_seconds[Kind.INPUT].per_token
    np.testing.assert_allclose(cost.seconds.exchange_per_token[Kind.INPUT], layers * most)


def test_bytes_are_those_of_the_fullest_rank() -> None:
    cost = machine(2)
    uneven = cost.loads([Chunk((Span(0, 0, 600, 0), Span(1, 0, 100, 1)))], (600, 100))
    even = cost.loads([Chunk((Span(0, 0, 600, 0), Span(1, 0, 600, 1)))], (600, 600))
    for loads in (uneven, even):
        np.testing.assert_array_equal(
            cost.memory.saved_bytes((0, "k"), loads), cost.memory.saved_bytes((0, "k"), even)
        )
        np.testing.assert_array_equal(cost.ends.held_bytes(loads), cost.ends.held_bytes(even))


@pytest.mark.parametrize("multiple", [1, 16])
def test_epp_leaves_documents_local_where_that_is_faster(multiple: int) -> None:
    cost = machine().replace(multiple=multiple)
    options = Options(effort=1)
    without = PLANNERS["epp"](
        BATCH, cost, dataclasses.replace(options, levers=TRAINING_LEVERS - {"local"})
    )
    local = PLANNERS["epp"](BATCH, cost, options)
    check(local.plan)
    check_ranks(local.plan, 8)
    assert any(chunk.has_local for chunk in local.plan.chunks)
    assert not any(chunk.has_local for chunk in without.plan.chunks)
    assert local.fits and local.seconds < 0.99 * without.seconds
    assert local.comm_ratio < without.comm_ratio
    assert local.lower_bound_seconds <= local.seconds
    played = play(local.plan, cost.table(local.plan))
    assert played.seconds == pytest.approx(local.seconds, rel=1e-12)
    assert tuple(played.peak_bytes) == local.peak_bytes


def test_nothing_is_local_where_nothing_is_exchanged_or_replicas_run_in_step() -> None:
    for cost, options in (
        (named_cost("llama3-8b", "h100-80g", pp=4, tp=8, zero=1), Options(effort=0)),
        (machine(4), Options(effort=0, lockstep=2)),
    ):
        step = plan_step(BATCH, cost, options, "epp", options.lockstep).step
        assert not any(c.has_local for plan in step.plans for c in plan.chunks)


def test_baselines_leave_all_spread() -> None:
    for name in COMPARED:
        if name != "epp":
            plan = PLANNERS[name](BATCH, machine(), Options(effort=0)).plan
            assert not any(chunk.has_local for chunk in plan.chunks)


def test_a_plan_for_more_ranks_is_refused_by_the_cost() -> None:
    text = "plan v1\ndocuments 5\nlayers 32\nchunk 0: 0[0:5]@3\nstage 0: F0 B0\n"
    cost = named_cost("llama3-8b", "h200-141g", pp=1, cp=2, tp=4)
    with pytest.raises(PlanError, match="expected one of the ranks 0 to 1"):
        cost.table(Plan.parse(text))


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=60), st.sampled_from((2, 4)))
def test_a_bound_without_exchange_is_below_the_other(lengths: list[int], cp: int) -> None:
    cost = machine(cp)
    every = np.array(lengths)
    assert lower_bound_seconds(every, cost, local=True) < lower_bound_seconds(every, cost)
    assert (rank_seconds(every, RATES, cp) > 0).all()
