"""Every planner: each token once, within the budget, the same plan for the same documents."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Kind, Op, Plan, PlanError, check
from megatron_epp.planner.options import ALL, TRAINING_LEVERS, Options
from megatron_epp.planner.registry import COMPARED, PLANNERS
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.sim.play import play
from tests.planner.cases import LENGTHS, ROOMS_GIB, evaluation_plan, machine, machines, priced
from tests.sim.replay import Replay

QUICK = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
LEVERS = st.sampled_from((ALL, TRAINING_LEVERS, frozenset[str](), ALL - {"wsplit"}))

EVEN = [name for name, row in PLANNERS.items() if row.takes((0, 1))]


def planned_or_refused(
    name: str, lengths: list[int], cost: Cost, options: Options
) -> PlannedReplica | None:
    try:
        return PLANNERS[name](lengths, cost, options)
    except PlanError as error:
        assert "needs at least" in str(error) or "no plan fits" in str(error)
        assert "\n" not in str(error)
        return None


def proves(planned: PlannedReplica, lengths: list[int], cost: Cost) -> None:
    """What a plan promises, judged by the checker and by the independent replay."""
    plan = planned.plan
    check(plan)
    assert plan.documents == tuple(lengths)
    assert plan.layers == cost.layout.layers
    replay = Replay(plan, cost.table(plan))
    assert max(replay.stop.values()) == planned.seconds
    assert tuple(replay.peak) == planned.peak_bytes
    assert planned.fits == all(
        peak <= budget for peak, budget in zip(replay.peak, cost.device_budget_bytes, strict=True)
    )
    assert planned.lower_bound_seconds <= planned.seconds * (1 + 1e-12)
    assert 0 < planned.lower_bound_seconds <= planned.seconds * (1 + 1e-12)
    assert plan.predicted is not None and plan.predicted.seconds == planned.seconds
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("name", COMPARED)
@given(LENGTHS, machines(), LEVERS, st.integers(0, 1))
@QUICK
def test_plans_are_sound(name, lengths, cost, levers, effort) -> None:
    planned = planned_or_refused(name, lengths, cost, Options(levers=levers, effort=effort))
    if planned is not None:
        proves(planned, lengths, cost)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.everything] * (name == "epp")) for name in EVEN]
)
@given(LENGTHS, machines(), st.randoms(use_true_random=False))
@settings(QUICK, max_examples=5)
def test_the_order_of_the_batch_changes_nothing(name, lengths, cost, random) -> None:
    """The same seconds, the same chunks up to the names of documents."""
    options = Options(levers=ALL, effort=0)
    shuffled = list(lengths)
    random.shuffle(shuffled)
    try:
        one, other = (PLANNERS[name](batch, cost, options) for batch in (lengths, shuffled))
    except PlanError:
        return
    assert one.seconds == other.seconds
    assert one.peak_bytes == other.peak_bytes
    assert shape(one.plan) == shape(other.plan)
    assert one.plan.orders == other.plan.orders
    assert one.plan.recompute == other.plan.recompute


def shape(plan: Plan) -> list[list[tuple[int, int, int]]]:
    """Chunks with documents named by their lengths."""
    return [
        sorted((plan.documents[span.document], span.start, span.stop) for span in chunk.spans)
        for chunk in plan.chunks
    ]


def test_padding_is_charged() -> None:
    """A chunk costs as many tokens as the executor pads it to, and slices end on the multiple."""
    lengths = [5_001, 3_003, 77, 50, 9]
    cost = machine(pp=2)
    padded = cost.replace(multiple=64)
    for name in COMPARED:
        planned = PLANNERS[name](lengths, padded, Options(context=5_001))
        plan = planned.plan
        check(plan)
        assert planned.seconds > play(plan, cost.table(plan)).seconds, name
        assert planned.seconds == pytest.approx(play(plan, padded.table(plan)).seconds), name
        for chunk in plan.chunks:
            for span in chunk.spans:
                assert span.stop == lengths[span.document] or span.stop % 64 == 0, name


@given(
    LENGTHS,
    st.integers(2, 8),
    st.sampled_from(ROOMS_GIB),
    st.sampled_from((ALL, TRAINING_LEVERS, frozenset[str]())),
    st.integers(0, 2),
    st.sampled_from((0.0, 0.02, 0.2)),
)
@settings(QUICK, max_examples=25)
@pytest.mark.everything
def test_splitting_is_never_slower_than_not(lengths, pp, room_gib, levers, effort, price) -> None:
    cost = priced(machine(pp=pp, room_gib=room_gib), price)
    whole, split = (
        planned_or_refused("epp", lengths, cost, Options(levers=chosen, effort=effort))
        for chosen in (levers - {"wsplit"}, levers | {"wsplit"})
    )
    if whole is not None:
        assert split is not None and split.fits
        assert split.seconds <= whole.seconds


def test_backwards_stay_whole_where_splitting_does_not_pay() -> None:
    """The same batch and machine, whose bubbles are small; only what I and W take beyond B
    differs. Where it is as much as on large chunks of a CPU, only the last backwards are split."""
    lengths = [30_000, 22_000, 9_000] + [900, 2_500, 4_000] * 40
    cost = machine(pp=4, zero=1)
    free, dear, dearest, whole = (
        PLANNERS["epp"](lengths, priced(cost, price), Options(levers=levers, effort=1))
        for price, levers in ((0.0, ALL), (0.1, ALL), (1.0, ALL), (0.0, ALL - {"wsplit"}))
    )
    assert free.seconds < dear.seconds < dearest.seconds <= whole.seconds
    splits = [
        sum(op.kind is Kind.WEIGHT for ops in each.plan.orders for op in ops)
        for each in (free, dear, dearest)
    ]
    backwards = dear.chunks * dear.plan.stages
    assert splits[0] > 0 and 0 < splits[1] < 0.4 * backwards and splits[2] == 0


def test_a_document_that_never_fits_is_named() -> None:
    cost = machine(pp=2, room_gib=12)
    for name in COMPARED:
        with pytest.raises(PlanError, match=r"document 1 of 400000 tokens on stage \d needs"):
            PLANNERS[name]([100, 400_000], cost, Options())


def test_no_documents_and_bad_lengths_are_refused() -> None:
    cost = machine(pp=2)
    for name in EVEN:
        with pytest.raises(ValueError, match="at least one length"):
            PLANNERS[name]([], cost, Options())
        with pytest.raises(ValueError, match="expected at least 1"):
            PLANNERS[name]([5, 0], cost, Options())


@given(LENGTHS, machines())
@settings(QUICK, max_examples=15)
def test_evaluation_plans_are_forwards_only(lengths, cost) -> None:
    try:
        plan = evaluation_plan(lengths, cost)
    except PlanError as error:
        assert "does not fit in evaluation" in str(error)
        return
    check(plan)
    assert plan.forward_only
    assert plan.documents == tuple(lengths)
    played = play(plan, cost.table(plan))
    assert all(p <= b for p, b in zip(played.peak_bytes, cost.device_budget_bytes, strict=True))


def test_evaluation_charges_what_passes_through_a_forward() -> None:
    """A single document, and a budget between its peak with that and without."""
    cost = machine(pp=1)
    one = evaluation_plan([15_962], cost)
    peak = max(play(one, cost.table(one)).peak_bytes)
    tight = cost.replace(device_budget_bytes=(peak - 1,))
    finer = evaluation_plan([15_962], tight)
    assert len(finer.chunks) > len(one.chunks)
    assert max(play(finer, tight.table(finer)).peak_bytes) < peak


def test_the_lower_bound_is_reached_by_one_stage() -> None:
    """One stage, one chunk: nothing to wait for, nothing to gain."""
    cost = dataclasses.replace(machine(pp=1))
    planned = PLANNERS["epp"]([4_000], cost, Options())
    assert planned.seconds == pytest.approx(planned.lower_bound_seconds, rel=1e-12)
    assert planned.plan.orders == ((Op.parse("F0"), Op.parse("B0")),)
