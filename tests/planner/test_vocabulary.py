"""Vocabulary parallelism in plans: H as early as can be, auto where it pays, off as it was."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import BACKWARDS, Kind, check
from megatron_epp.planner.choose.choice import VOCABULARY_PAYS, RunChoice, run_choice
from megatron_epp.planner.chunks.params import ChunkingParams, build_chunks
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.registry import COMPARED, PLANNERS
from megatron_epp.planner.replicas import plan_step
from megatron_epp.sim.play import play
from tests.cost.simple_device import OLD_H100
from tests.planner.cases import evaluation_plan

LENGTHS = [60_000, 20_000, 9_000] + [4_000] * 12 + [900] * 20


def cost(pp: int = 4, model: str = "llama3-8b", **how) -> Cost:
    return named_cost(model, OLD_H100, pp=pp, cp=8, zero=1, logits_held=False, **how)


@pytest.mark.parametrize("planner", COMPARED)
@pytest.mark.parametrize("pp", [2, 4])
def test_an_h_runs_as_soon_as_its_stage_is_free(planner: str, pp: int) -> None:
    """No other op starts on a stage between an H's message and its start: the last stage's
    backward waits for the H of all stages."""
    cut = cost(pp, vocabulary_parallel=True)
    plan = PLANNERS[planner](LENGTHS, cut, Options(effort=1)).plan
    assert plan.vocabulary_parallel
    played = play(plan, cut.table(plan))
    arrived = {(f.message.target, f.message.chunk): f.arrive for f in _of_head(played.flights)}
    for stage in range(pp):
        records = [record for record in played.records if record.stage == stage]
        for before, record in pairwise(records):
            if record.op.kind is Kind.HEAD and before.op.kind is not Kind.HEAD:
                assert before.start <= arrived[stage, record.op.chunk]


def _of_head(flights):
    return [flight for flight in flights if flight.message.payload.value == "H"]


def test_g_fills_bubbles() -> None:
    """Some wait for a gap, and no B waits while one that need not run does."""
    cut = cost(vocabulary_parallel=True)
    plan = PLANNERS["epp"](LENGTHS, cut, Options(effort=1)).plan
    late = 0
    for order in plan.orders:
        at = {op: place for place, op in enumerate(order)}
        for op in order:
            if op.kind in BACKWARDS:
                weight = next(g for g in order if (g.kind, g.chunk) == (Kind.HEAD_WEIGHT, op.chunk))
                late += at[weight] > at[op] + 1
    assert late > len(plan.chunks)


@pytest.mark.parametrize("local", [0.0, 1.0])
def test_a_ramp_fills_the_pipeline(local: float) -> None:
    """Packs at the front grow from a tenth of a full one; every document is there once."""
    cut = cost(8, vocabulary_parallel=True)
    lengths = np.array([2_000] * 300 + [500] * 400)
    params = ChunkingParams(20.0, ramp=10, local=local)
    chunking = build_chunks(params, lengths, rates_of(cut), 10**9, 1, cut.layout.cp)
    assert np.array_equal(np.bincount(chunking.spans.document, chunking.spans.tokens), lengths)
    filled = np.bincount(chunking.chunk, chunking.spans.tokens)
    full = np.median(filled[10:])
    assert filled[0] < 0.2 * full < filled[9] < full
    assert np.diff(filled[:10]).min() > -0.02 * full
    assert filled[10:].min() > 0.85 * full


def test_it_saves_the_last_stages_bubble() -> None:
    """Where the output layer is 2.4 layers of eight, nearly all the time that the others idle."""
    whole, cut = (
        PLANNERS["epp"](LENGTHS * 4, cost(vocabulary_parallel=each), Options(effort=1))
        for each in (False, True)
    )
    assert whole.bubble_ratio > 0.1 > 2 * cut.bubble_ratio
    assert cut.seconds < 0.93 * whole.seconds
    assert whole.plan.vocabulary_parallel is False
    assert cut.lower_bound_seconds < cut.seconds


def test_evaluation_has_h_behind_its_forwards() -> None:
    cut = cost(vocabulary_parallel=True)
    plan = evaluation_plan(LENGTHS, cut)
    check(plan)
    assert plan.forward_only and plan.vocabulary_parallel
    played = play(plan, cut.table(plan))
    assert played.seconds < 1.6 * play(*_whole(LENGTHS)).seconds


def _whole(lengths):
    plain = cost()
    plan = evaluation_plan(lengths, plain)
    return plan, plain.table(plan)


def test_replicas_have_it_too() -> None:
    cut = cost(2, vocabulary_parallel=True)
    for lockstep in (1, 2):
        step = plan_step(LENGTHS, cut, Options(effort=0, lockstep=lockstep), replicas=2).step
        assert all(plan.vocabulary_parallel for plan in step.plans)
        for plan in step.plans:
            check(plan)


def test_auto_takes_what_is_faster() -> None:
    def chosen(of: Cost, lengths: list[int]) -> RunChoice:
        options = Options(effort=1)
        return run_choice(of, [lengths], options, "epp", vocabularies=(False, True))

    found = chosen(cost(), LENGTHS)
    off, on = sorted(found.seconds, key=lambda way: way.vocabulary)
    assert found.way == on and found.cost.layout.vocabulary_parallel and found.gain > 0.03
    assert found.gain == 1 - found.seconds[on] / found.seconds[off]
    # Without an output layer that takes time, messages alone are left of it.
    light = chosen(cost().replace(profile=_without_head(cost())), LENGTHS)
    assert not light.cost.layout.vocabulary_parallel
    assert all(light.gain_of(way) < VOCABULARY_PAYS for way in light.seconds)


def _without_head(of: Cost):
    none = {kind: type(each)() for kind, each in of.layout.profile.last_seconds.items()}
    return dataclasses.replace(of.layout.profile, last_seconds=none)
