"""Residuals of ops, and a refit that is kept only where it foretells better."""

import dataclasses
from random import Random

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import WindowPairs
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.refit import LEAST, refit
from megatron_epp.cost.fitting.residuals import ErrorTable, residuals
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import pairs_within
from megatron_epp.cost.profile import Seconds, layer_coefficients
from megatron_epp.ir import BACKWARDS, Kind, Message, Op, Payload, Span, Timed, Transfer
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.sim.play import play

MODEL = Model("small", 4, 64, 176, 4, 2, 16, 1000, gated=True)
PROFILE = profile(MODEL, DEVICES["cpu"])


def test_a_played_plan_has_no_residuals() -> None:
    cost = Cost(StageLayout(PROFILE, (2, 2)), (1e15, 1e15))
    plan = arbitrary_plan([500, 900, 70], cost.layout.layers, Random(1), modes="kfcmnab")
    table = cost.table(plan)
    found = residuals(plan, table, play(plan, table).records)
    assert len(found) == sum(map(len, plan.orders))
    assert max(abs(one.error) for one in found) < 1e-9


def test_transfers_and_nothing_have_no_residual() -> None:
    cost = Cost(StageLayout(PROFILE, (4,)), (1e15,))
    plan = arbitrary_plan([50], cost.layout.layers, Random(1))
    message = Message(Payload.ACTIVATION, 0, 0, 1)
    records = [
        Timed(0, Transfer(Kind.SEND, message), 0.0, 1.0),
        Timed(0, Op(Kind.FORWARD, 0), 1, 1),
    ]
    assert residuals(plan, cost.table(plan), records) == []


def test_errors_are_sorted_by_slice_and_context() -> None:
    cost = Cost(StageLayout(PROFILE, (4,)), (1e15,))
    plan = arbitrary_plan([600, 90], cost.layout.layers, Random(4))
    table = cost.table(plan)
    sorts = ErrorTable()
    sorts.add(residuals(plan, table, play(plan, table).records))
    sorts.add(residuals(plan, table, play(plan, table).records))
    rows = sorts.rows()
    assert sum(int(row[4]) for row in rows) == 2 * len(plan.orders[0])
    assert all(float(row[5].rstrip("%")) == 0 for row in rows)
    assert sorts.rows(least=10**6) == []


# ------------------------------------------------------------------ refit


def samples(truth, count: int, seed: int = 0) -> dict[Kind, list[Sample]]:
    """Ops of a machine that ``truth`` describes, with 2% noise."""
    random = Random(seed)
    made: dict[Kind, list[Sample]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
    for _ in range(count):
        tokens = random.randint(200, 4000)
        context = random.choice((0, 0, 3000))
        pairs = tokens * context + tokens * (tokens + 1) // 2
        first = random.random() < 0.5
        choice = random.choice(("kkkk", "fkkk", "ffff"))
        for kind, rows in made.items():
            seconds = 4 * truth.layer_seconds[kind](tokens, pairs)
            ends = truth.first_seconds if first else truth.last_seconds
            seconds += ends[kind](tokens, pairs)
            if kind in BACKWARDS:
                seconds += choice.count("f") * truth.recompute_seconds["f"](tokens, pairs)
            noise = random.gauss(1, 0.02)
            rows.append(Sample(choice, first, not first, tokens, pairs, 0, seconds * noise))
    return made


def slower(factor: float):
    layer = {
        kind: Seconds(s.per_token * factor, s.per_pair * factor, s.per_chunk * factor)
        for kind, s in PROFILE.layer_seconds.items()
    }
    return dataclasses.replace(PROFILE, layer_seconds=layer)


def test_a_machine_that_slowed_down_is_learnt() -> None:
    """Stages of one pipeline do not tell layers and ends apart; the profile that was there does."""
    truth = slower(1.6)
    found = refit(PROFILE, samples(truth, 60))
    assert found is not None
    assert found.before > 0.2
    assert found.after < 0.05
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        learnt, right = (p.layer_seconds[kind].per_token for p in (found.profile, truth))
        assert learnt == pytest.approx(right, rel=0.15)
    for layers, error in (((4, 4), 0.05), ((7, 1), 0.1)):
        plan = arbitrary_plan([2000, 900], layers, Random(2))
        costs = (Cost(StageLayout(p, layers), (1e15, 1e15)) for p in (truth, found.profile))
        right, learnt = (play(plan, cost.table(plan)).seconds for cost in costs)
        assert learnt == pytest.approx(right, rel=error)
    # Bytes and whatever else was not measured stay.
    assert found.profile.saved_bytes == PROFILE.saved_bytes
    assert found.profile.tensor_bytes_per_token == PROFILE.tensor_bytes_per_token


NEAR = WindowPairs(100)


def of_kinds(truth, count: int) -> dict[Kind, list[Sample]]:
    """As ``samples``, of four stages with layers of two kinds, two of them without ends."""
    random = Random(3)
    made: dict[Kind, list[Sample]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
    for _ in range(count):
        tokens, context = random.randint(200, 4000), random.choice((0, 0, 3000))
        pairs = tokens * context + tokens * (tokens + 1) // 2
        near = pairs_within((Span(0, context, context + tokens),), 100)
        stage = random.randrange(4)
        word = (("near", "far", "near"), ("near",) * 3, ("far",) * 3, ("near", "far", "far"))[stage]
        choice = random.choice(("kkk", "fkk", "kkf", "fff"))
        for op, rows in made.items():
            seconds = (stage == 0) * truth.first_seconds[op](tokens, pairs)
            seconds += (stage == 3) * truth.last_seconds[op](tokens, pairs)
            for kind, letter in zip(word, choice, strict=True):
                figures = truth.kinds[kind]
                load = (tokens, near if figures.window else pairs)
                seconds += figures.layer_seconds[op](*load)
                if op in BACKWARDS:
                    seconds += figures.recompute_seconds[letter](*load)
            seconds *= random.gauss(1, 0.02)
            ends = (stage == 0, stage == 3)
            rows.append(Sample(choice, *ends, tokens, pairs, 0, seconds, word, ((NEAR, near),)))
    return made


def test_one_kind_that_slowed_down_is_learnt() -> None:
    """Of two: the other stays what it was."""
    shapes = {"near": LayerShape(window=100), "far": LayerShape(experts=8, active_experts=2,
                                                                expert_hidden=64)}  # fmt: skip
    model = dataclasses.replace(MODEL, layers=6, kinds=shapes, pattern="2*near far near 2*far")
    before = profile(model, DEVICES["cpu"])
    far = dataclasses.replace(
        layer_coefficients(before.other_kinds["far"]),
        **{
            name: {key: dataclasses.replace(s, per_token=2 * s.per_token) for key, s in it.items()}
            for name, it in (
                ("layer_seconds", before.other_kinds["far"].layer_seconds),
                ("recompute_seconds", before.other_kinds["far"].recompute_seconds),
            )
        },
    )
    truth = before.with_kinds({"near": layer_coefficients(before), "far": far})
    found = refit(before, of_kinds(truth, 80))
    assert found is not None and found.after < 0.05
    for op in (Kind.FORWARD, Kind.BACKWARD):
        for kind in ("near", "far"):
            learnt, right = (p.kinds[kind].layer_seconds[op] for p in (found.profile, truth))
            assert learnt.per_token == pytest.approx(right.per_token, rel=0.15), (op, kind)
    word = ("near", "far", "far", "far", "far", "near")
    plan = arbitrary_plan([2000, 900], (5, 1), Random(2))
    right, learnt, old = (
        play(plan, Cost(StageLayout(p, (5, 1), layer_kinds=word), (1e15, 1e15)).table(plan)).seconds
        for p in (truth, found.profile, before)
    )
    assert learnt == pytest.approx(right, rel=0.1) and right > 1.1 * old
    assert found.profile.kinds["far"].saved_bytes == before.kinds["far"].saved_bytes
    assert found.profile.kinds["near"].window == 100


def test_a_model_that_is_right_is_kept() -> None:
    assert refit(PROFILE, samples(PROFILE, 60)) is None


def test_nothing_is_learnt_of_few_ops() -> None:
    assert refit(PROFILE, samples(slower(3.0), LEAST // 2 - 1)) is None
