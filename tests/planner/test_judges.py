"""Slow, obvious judges for whatever has an optimum: exhaustive search, and scipy's MILP solver."""

import dataclasses
import itertools
from random import Random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from megatron_epp.ir import KEEP, Kind, Op, Plan, PlanError
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.planner.chunks.bin_packing import longest_first
from megatron_epp.planner.chunks.slicing import cut_at
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order import list_scheduler
from megatron_epp.planner.order.compiled import B, I, W
from megatron_epp.planner.order.emit import Draft, plan_of
from megatron_epp.planner.order.list_scheduler import Policy, list_schedule
from megatron_epp.planner.order.policies import (
    PolicyParams,
    late_splits,
    policies,
    policy_of,
    warm_up_policies,
)
from megatron_epp.planner.order.problem import ChunkProblems, rates_of
from megatron_epp.planner.order.replay import replayed
from megatron_epp.planner.order.warmup import group_by_group, pipelines, shrinking_in_flight
from megatron_epp.planner.recompute import ilp
from megatron_epp.planner.recompute.choices import freed_bytes, ladder
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import balance_replicas
from megatron_epp.sim.play import play
from tests.planner.cases import machine, prepared


def every_order(chunks: int) -> list[tuple[Op, ...]]:
    """All orders of F and B of one stage in which each B follows its F."""
    ops = [Op(kind, c) for kind in (Kind.FORWARD, Kind.BACKWARD) for c in range(chunks)]
    found = []
    for order in itertools.permutations(ops):
        place = {op: at for at, op in enumerate(order)}
        if all(place[Op(Kind.FORWARD, c)] < place[Op(Kind.BACKWARD, c)] for c in range(chunks)):
            found.append(order)
    return found


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ((3_300, 3_000, 2_700), False),
        pytest.param((9_000, 500), True, marks=pytest.mark.everything),
    ],
)
def test_list_scheduling_against_every_order(lengths, cut) -> None:
    """Two stages, three chunks: the styles of epp come within 3% of the best of all orders, and
    no order is faster than the bound."""
    cost = machine(pp=2)
    batch, chunking, _, work, in_flight_limit = prepared(cost, lengths, 3.0)
    assert chunking.count == 3 and (chunking.document.max() >= 0) == cut
    ours = min(
        list_schedule(work, policy_of(style, work, in_flight_limit)).seconds
        for style in policies(False, many=True)
    )
    layers = cost.layout.layers
    base = {
        "documents": batch.documents,
        "layers": layers,
        "chunks": chunking.ir_chunks(batch.names),
        "recompute": tuple(("k" * n,) * 3 for n in layers),
    }
    table, best = None, np.inf
    for orders in itertools.product(every_order(3), repeat=2):
        plan = Plan(**base, orders=orders)
        if table is None:
            table = cost.table(plan)
        try:
            best = min(best, play(plan, table).seconds)
        except PlanError:
            continue
    assert lower_bound_seconds(batch.lengths, cost) <= best
    assert best * (1 - 1e-12) <= ours <= 1.03 * best


@pytest.mark.parametrize("seed", range(6))
def test_the_diagonal_program_against_scipy(seed) -> None:
    """The same optimum within the 2% gap; the relaxation, rounded up, is feasible."""
    random = Random(seed)
    cost = machine(pp=random.choice((2, 3)), room_gib=2)
    lengths = [random.randint(2_000, 12_000) for _ in range(10)]
    _, _, loads, work, in_flight_limit = prepared(cost, lengths, 8.0)
    alone = list_schedule(
        work, policy_of(next(iter(policies(False, many=False))), work, in_flight_limit)
    )
    budget = alone.peak_bytes * random.uniform(0.55, 0.9)
    rows = ilp.memory_rows(
        in_flight_limit,
        work.backward_order,
        work.ops.moved_bytes,
        freed_bytes(cost, loads, "kf"),
        budget,
    )
    assert len(rows.missing_bytes)
    most = np.full(rows.slots, min(cost.layout.layers))
    ours = ilp.solve_rows(ilp.Solver(), rows, most)
    matrix = np.zeros((len(rows.missing_bytes), rows.slots))
    for row in range(len(rows.missing_bytes)):
        for entry in range(rows.starts[row], rows.starts[row + 1]):
            matrix[row, rows.slot[entry]] += rows.freed[entry]
    scale = rows.missing_bytes.max()
    judge = milp(
        np.ones(rows.slots),
        constraints=LinearConstraint(matrix / scale, rows.missing_bytes / scale, np.inf),
        bounds=Bounds(0, most),
        integrality=np.ones(rows.slots),
    )
    assert (ours is None) == (judge.status == 2)
    if ours is None:
        return
    assert (matrix @ ours >= rows.missing_bytes * (1 - 1e-9)).all()
    assert judge.fun - 1e-6 <= ours.sum() <= np.floor(judge.fun * 1.021 + 1)
    relaxed = ilp.solve_rows(ilp.Solver(), rows, most, integer=False)
    assert relaxed is not None
    assert (matrix @ relaxed >= rows.missing_bytes * (1 - 1e-9)).all()


def test_the_diagonal_program_says_when_nothing_helps() -> None:
    rows = ilp.MemoryRows(
        2, 1, np.array([0, 2]), np.array([0, 1]), np.array([1.0, 1.0]), np.array([100.0])
    )
    assert ilp.solve_rows(ilp.Solver(), rows, np.array([3, 3])) is None
    assert ilp.solve_rows(ilp.Solver(), rows, np.array([60, 60])).sum() == 100


@pytest.mark.parametrize("seed", range(10))
def test_dealing_against_every_dealing(seed) -> None:
    """Longest first, to replicas and to packs, is within 4/3 of the best of all dealings; each
    replica and each pack gets a document."""
    random = Random(seed)
    cost = machine(pp=2)
    rates, owners = rates_of(cost), random.choice((2, 3))
    lengths = sorted((random.randint(100, 20_000) for _ in range(7)), reverse=True)
    seconds = rates.document_seconds(np.array(lengths))

    def slowest(owner) -> float:
        sums = np.bincount(owner, weights=seconds, minlength=owners)
        return float(sums.max()) if (np.bincount(owner, minlength=owners) > 0).all() else np.inf

    best = min(slowest(owner) for owner in itertools.product(range(owners), repeat=7))
    assignments = balance_replicas(lengths, cost, owners)
    assert sorted(d for held in assignments for d in held) == list(range(7))
    replica_of = np.empty(7, dtype=int)
    for replica, held in enumerate(assignments):
        replica_of[list(held)] = replica
    uncut = cut_at(np.array(lengths), np.array([0, lengths[0]]))
    pack_of, packs = longest_first(uncut, rates, owners, 1e9)
    assert packs == owners
    for owner in (replica_of, pack_of):
        assert best - 1e-12 <= slowest(owner) <= (4 / 3 - 1 / (3 * owners)) * best + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_rows_on_demand_lead_to_the_same_program(seed, monkeypatch) -> None:
    """Deep pipelines start with a few rows; what comes out keeps all of them."""
    random = Random(seed)
    cost = machine(pp=4, room_gib=3)
    lengths = [random.randint(2_000, 12_000) for _ in range(30)]
    _, chunking, loads, work, in_flight_limit = prepared(cost, lengths, 40.0)
    solver = ilp.Solver()
    freed = freed_bytes(cost, loads, "kf")
    most = np.full(chunking.count + cost.layout.stages - 1, min(cost.layout.layers))

    def solved() -> np.ndarray:
        found = ilp.solve_order(
            solver,
            in_flight_limit,
            work.backward_order,
            work.ops.moved_bytes,
            freed,
            work.headroom_bytes,
            most,
            integer=False,
        )
        assert found is not None
        return found

    everything = solved()
    assert everything.any()
    monkeypatch.setattr(ilp, "MANY_ENTRIES", 0)
    on_demand = solved()
    saved = freed[0] * ilp.broadcast_diagonals(
        on_demand[0], work.backward_order, cost.layout.stages
    )
    missing, _ = ilp._missing(
        in_flight_limit, work.backward_order, work.ops.moved_bytes, saved, work.headroom_bytes
    )
    assert missing.max() <= 0
    assert on_demand.sum() <= everything.sum() * 1.1 + 4


def test_the_ladder_is_convex() -> None:
    """Each step frees its bytes at a higher price than the one before."""
    cost = machine()
    loads = prepared(cost, [30_000, 500], 4.0).loads
    letters = ladder(cost, loads)
    assert letters[0] == "k" and letters[-1] == "f" and len(letters) > 2
    saved = [cost.memory.saved_bytes((0, letter), loads).sum() for letter in letters]
    seconds = [cost.seconds.recompute((0, letter), loads).sum() for letter in letters]
    prices = np.diff(seconds) / -np.diff(saved)
    assert (np.diff(saved) < 0).all() and (np.diff(prices) > 0).all()


def test_a_strict_order_is_that_of_the_list_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed at once instead of op by op: the same ops, times and bytes, to the last bit."""
    cost = machine(pp=4, room_gib=3, link_seconds=True)
    _, chunking, _, work, _ = prepared(cost, [20_000, 9_000, 7_000] + [1_500] * 12, 12.0)
    sizes = chunking.sizes
    limits = [shrinking_in_flight(sizes, 4), group_by_group(sizes, 4), pipelines(sizes, [2, 5], 4)]
    limits.append(np.zeros_like(limits[0]))  # incomplete: backwards before their forwards
    policies = [Policy(limit, limit, limit) for limit in limits]
    at_once = [list_schedule(work, policy) for policy in policies]
    monkeypatch.setattr(list_scheduler, "strict_orders", lambda *limits: (None, None, False))
    for found, policy in zip(at_once, policies, strict=True):
        expected = list_schedule(work, policy)
        for field in dataclasses.fields(expected):
            ours, right = (np.asarray(getattr(each, field.name)) for each in (found, expected))
            assert np.array_equal(ours, right) and ours.dtype == right.dtype, field.name


@pytest.mark.parametrize(("pp", "cut"), [(4, False), (4, True), (2, True)])
def test_orders_played_again_take_what_they_took(pp, cut) -> None:
    """Whole and split, over links; and with other work what the simulator says. Two stages share
    a link between gradients and what H wants."""
    cost = machine(pp=pp, room_gib=3, link_seconds=True, vocabulary_parallel=cut)
    lengths = [20_000, 9_000, 7_000] + [1_500] * 12
    batch, chunking, loads, plain, in_flight_limit = prepared(cost, lengths, 12.0)
    more = {(0, "f"): np.full((pp, chunking.count), 3.0)}
    recomputing = ChunkProblems(cost, chunking, loads).of(more)
    late = [late for strict in (True, False) for late in late_splits(PolicyParams(strict))]
    for style in (*policies(True, many=True), *late):
        schedule = list_schedule(plain, policy_of(style, plain, in_flight_limit))
        again = replayed(plain, schedule)
        assert again.seconds == schedule.seconds
        assert (again.start == schedule.start).all() and (again.stop == schedule.stop).all()
        assert (again.peak_bytes == schedule.peak_bytes).all()
        other = replayed(recomputing, schedule)
        draft = Draft(chunking, more, schedule.kinds, schedule.chunks)
        plan = plan_of(batch, draft, cost)
        played = play(plan, cost.table(plan))
        assert other.seconds == pytest.approx(played.seconds, rel=1e-12)
        peaks = other.peak_bytes + np.array(cost.memory.states_bytes)
        assert peaks == pytest.approx(played.peak_bytes, rel=1e-12)


@pytest.mark.parametrize("placement", ["even", "v", "interleaved 3"])
def test_first_backwards_of_a_late_split_are_whole(placement) -> None:
    """All whole: as without splits. Else as many I, then as many W, as backwards are left."""
    cost = machine(pp=2, room_gib=60, link_seconds=True)
    cost = cost if placement == "even" else placed_cost(cost, placement)
    place = cost.layout.placement.place
    _, chunking, _, work, _ = prepared(cost, [20_000, 9_000, 7_000] + [1_500] * 12, 12.0)
    backwards = chunking.count * len(place) // 2
    for policy, _ in list(warm_up_policies(place, chunking.sizes, (False,))):
        unsplit = list_schedule(work, policy)
        split = policy._replace(split=True, unsplit=backwards)
        late, width = list_schedule(work, split), unsplit.kinds.shape[1]
        assert late.seconds == unsplit.seconds
        assert (late.peak_bytes == unsplit.peak_bytes).all()
        assert (late.kinds[:, :width] == unsplit.kinds).all()
        assert (late.start[:, :width] == unsplit.start).all()
        for whole in (0, 5, backwards - 1):
            kinds = list_schedule(work, split._replace(unsplit=whole)).kinds
            for row in kinds:
                of_backwards = row[(row == B) | (row == I)]
                assert of_backwards.tolist() == [B] * whole + [I] * (backwards - whole)
                assert (row == W).sum() == backwards - whole


@pytest.mark.everything
def test_no_uniform_recompute_beats_the_plan_on_its_own_orders() -> None:
    """One letter for so many layers of every stage and chunk, within the same budget."""
    lengths = [2_676, 16_384, 3_507, 16_384]
    ample = machine(pp=4, room_gib=1e6)
    kept = PLANNERS["epp"](lengths, ample, Options())
    states = np.array(ample.memory.states_bytes)
    for share in (0.75, 0.5):
        budget = states + share * (np.array(kept.peak_bytes) - states)
        cost = ample.replace(device_budget_bytes=tuple(budget.tolist()))
        ours = PLANNERS["epp"](lengths, cost, Options())
        assert ours.fits and ours.recompute_ratio > 0
        for letter, layers in itertools.product("nbf", range(1, max(cost.layout.layers) + 1)):
            choice = letter * layers + KEEP * (cost.layout.layers[0] - layers)
            alike = dataclasses.replace(
                ours.plan, recompute=((choice,) * ours.chunks,) * cost.layout.stages, predicted=None
            )
            played = play(alike, cost.table(alike))
            if (np.array(played.peak_bytes) <= budget).all():
                assert ours.seconds <= played.seconds * (1 + 1e-9)
