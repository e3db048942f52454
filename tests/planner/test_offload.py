"""The lever offload: what hides costs nothing, what it saves is recompute, and off it is off."""

import dataclasses
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.host_memory import host_peak_bytes
from megatron_epp.ir import BACKWARDS, OFFLOAD, Kind, Plan
from megatron_epp.planner.epp.player import STRICT
from megatron_epp.planner.epp.search import Search
from megatron_epp.planner.options import ALL, Options
from megatron_epp.planner.order.problem import ChunkProblems, ScheduleProblem, with_unrecomputed
from megatron_epp.planner.recompute import ilp, offload
from megatron_epp.planner.recompute.choices import diagonal_counts
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.result import PlannedReplica
from tests.planner.cases import LENGTHS, machine, prepared
from tests.planner.test_planners import QUICK, planned_or_refused, proves

LONG = [30_000, 22_000, 9_000] + [900, 2_500, 4_000] * 8
# All documents spread: two ways to plan would make two stories of one.
OFF = Options(levers=ALL - {"offload", "local"})
ON = Options(levers=ALL - {"local"})


def at_rate(cost: Cost, rate: float) -> Cost:
    profile = dataclasses.replace(cost.layout.profile, host_bytes_per_second=rate)
    return cost.replace(profile=profile)


@cache
def planned_on(options: Options, room_gib: float = 3) -> PlannedReplica:
    """The plan of LONG that several tests look at."""
    return PLANNERS["epp"](LONG, machine(pp=4, room_gib=room_gib), options)


def letters(plan: Plan) -> set[str]:
    return {letter for stage in plan.recompute for choice in stage for letter in choice}


@given(
    LENGTHS, st.integers(1, 4), st.sampled_from((1e9, 5e9, 20e9, 1e12)), st.sampled_from((1.0, 9.0))
)
@settings(QUICK, max_examples=40)
def test_what_hides_takes_no_time_and_one_layer_more_does(lengths, pp, rate, chunks) -> None:
    cost = at_rate(machine(pp=pp, head_seconds=True), rate)
    loads = prepared(cost, lengths, chunks).loads
    layers = np.array(cost.layout.layers, float)[:, None]

    def seconds(aside: np.ndarray) -> np.ndarray:
        table = cost.table_of(loads, with_unrecomputed(cost, {(0, OFFLOAD): aside}, loads.chunks))
        return np.stack([table.seconds[kind] for kind in (Kind.FORWARD, *BACKWARDS)])

    hidden = offload.hidden_layers(cost, loads)[0, OFFLOAD]
    assert ((hidden >= 0) & (hidden <= layers)).all()
    alone = seconds(np.zeros_like(hidden))
    assert seconds(hidden) == pytest.approx(alone, rel=1e-12)
    longer = seconds(np.minimum(hidden + 1, layers)) > alone * (1 + 1e-12)
    assert (longer.any(axis=0) == (hidden < layers)).all()


@pytest.mark.parametrize("seed", range(8))
def test_recompute_of_what_is_left_fits_wherever_all_of_it_would(seed) -> None:
    """Chunks of a diagonal have different numbers of layers left; none recomputes more than it
    has, and what the program says to recompute is enough."""
    random = Random(seed)
    stages = random.choice((2, 4))
    cost = at_rate(machine(pp=stages, room_gib=3.3), random.choice((3e9, 20e9)))
    lengths = [random.randint(2_000, 25_000) for _ in range(12)]
    _, chunking, loads, _, in_flight_limit = prepared(cost, lengths, 14.0)
    layers = np.array(cost.layout.layers, float)[:, None]
    aside = (
        offload.hidden_layers(cost, loads)[0, OFFLOAD] * (np.arange(stages) != stages - 1)[:, None]
    )
    assert len(np.unique(aside)) > 1

    def work(again: dict[str, np.ndarray]) -> ScheduleProblem:
        return ChunkProblems(cost, chunking, loads).of({(0, OFFLOAD): aside, **again})

    def fits(work: ScheduleProblem) -> bool:
        return ilp.within(
            in_flight_limit, work.backward_order, work.ops.moved_bytes, work.headroom_bytes
        ).all()

    found = diagonal_counts(
        ilp.Solver(), cost, loads, work({}), in_flight_limit, integer=False, steps=("knf",),
        layers=[layers - aside],
    )  # fmt: skip
    assert (found is not None) == fits(work({(0, "f"): layers - aside}))
    if found is not None:
        assert (sum(found.values()) <= layers - aside).all()
        assert all((grid >= 0).all() for grid in found.values())
        assert fits(work(found))


@pytest.mark.parametrize("chunks", [6.0, 14.0, 30.0])
def test_where_offloading_reaches_nothing_is_recomputed_and_no_time_is_lost(chunks) -> None:
    """A rate that hides everything, and memory for the window law with all layers offloaded and
    no byte more: 1F1B takes what it takes with ample memory."""
    ample = at_rate(machine(pp=4, room_gib=1e6), 1e15)
    batch, chunking, *_ = prepared(ample, LONG, chunks)
    search = Search(batch, ample, ON)
    everything = np.tile(np.array(ample.layout.layers, float)[:, None], (1, chunking.count))
    kept = search.prepare(chunking)
    aside = search.recounted(kept, {(0, OFFLOAD): everything})
    quick = search.play(kept, STRICT, "")
    peaks = search.play(aside, STRICT, "").schedule.peak_bytes
    tight = ample.replace(
        device_budget_bytes=tuple((np.array(ample.memory.states_bytes) + np.ceil(peaks)).tolist())
    )
    found = Search(batch, tight, ON)
    table = found.prepare(chunking)
    assert set(table.counts) == {(0, OFFLOAD)}
    played = found.play(table, STRICT, "")
    assert played.over_bytes == 0
    assert played.seconds == pytest.approx(quick.seconds, rel=1e-12)
    without = Search(batch, tight, OFF)
    recomputing = without.play(without.prepare(chunking), STRICT, "")
    assert recomputing.rank > played.rank


def test_where_memory_is_tight_layers_are_offloaded() -> None:
    cost = machine(pp=4, room_gib=3)
    without, tight = planned_on(OFF), planned_on(ON)
    assert OFFLOAD not in letters(without.plan)
    assert without.recompute_ratio > 0
    assert OFFLOAD in letters(tight.plan)
    assert tight.recompute_ratio < without.recompute_ratio
    assert tight.seconds < 0.99 * without.seconds
    proves(tight, LONG, cost)
    assert tight.fits


@pytest.mark.everything
def test_without_the_lever_or_a_rate_or_need_nothing_changes() -> None:
    """The same text, to the last letter."""
    random = Random(7)
    for room_gib in (3.5, 6, 60):
        cost = machine(pp=3, room_gib=room_gib)
        lengths = [random.randint(10, 30_000) for _ in range(40)]
        plain = PLANNERS["epp"](lengths, cost, OFF).plan
        assert PLANNERS["epp"](lengths, at_rate(cost, 0.0), ON).plan == plain
        assert PLANNERS["epp"](lengths, at_rate(cost, 1e15), OFF).plan == plain
        if not letters(plain) - {"k"}:
            assert PLANNERS["epp"](lengths, cost, ON).plan == plain


def test_recompute_fills_what_offloading_leaves() -> None:
    """A link so slow that few layers hide: both letters in one plan, and all of it plays."""
    cost = at_rate(machine(pp=4, room_gib=3.5), 6e9)
    planned = PLANNERS["epp"](LONG, cost, ON)
    proves(planned, LONG, cost)
    assert OFFLOAD in letters(planned.plan) and letters(planned.plan) - {"k", OFFLOAD}


@given(LENGTHS, st.integers(1, 4), st.sampled_from((0.05, 0.5, 2.0)), st.integers(0, 1))
@settings(QUICK, max_examples=8)
@pytest.mark.everything
def test_no_plan_takes_more_of_the_host_than_there_is(lengths, pp, host_gib, effort) -> None:
    cost = at_rate(machine(pp=pp, room_gib=3.0), 1e12).replace(host_budget_bytes=host_gib * GIB)
    planned = planned_or_refused("epp", lengths, cost, Options(levers=ALL, effort=effort))
    if planned is not None:
        assert max(host_peak_bytes(cost, planned.plan)) <= host_gib * GIB


def test_the_hosts_memory_is_counted_by_hand() -> None:
    cost = machine(pp=1)
    text = "plan v1\ndocuments 100 50\nlayers 32\nchunk 0: 0[0:100]\nchunk 1: 1[0:50]\n"
    text += "recompute 0: 2o30k 30f2o\nstage 0: F0 F1 I1 B0 W1\n"
    layer = cost.layout.profile.saved_bytes["k"].per_token / cost.layout.shards
    (peak,) = host_peak_bytes(cost, Plan.parse(text))
    assert peak == pytest.approx(2 * layer * 150, abs=1)
    (peak,) = host_peak_bytes(cost, Plan.parse(text.replace("F0 F1 I1 B0 W1", "F0 B0 F1 B1")))
    assert peak == pytest.approx(2 * layer * 100, abs=1)
    assert host_peak_bytes(cost, Plan.parse(text.replace("F0 F1 I1 B0 W1", "F0 F1"))) == (0,)
