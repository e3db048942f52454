"""Planning for layers of several kinds, against exhaustive search and against one kind."""

import dataclasses
import itertools
from random import Random

import numpy as np
import pytest

from megatron_epp.cost.layer_kinds import parse_kinds
from megatron_epp.cost.profile import layer_coefficients
from megatron_epp.ir import Kind
from megatron_epp.planner.chunks.slicing import equal_points
from megatron_epp.planner.options import ALL, Options
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.problem import ChunkProblems, every_layer, left_layers, rates_of
from megatron_epp.planner.order.warmup import group_by_group
from megatron_epp.planner.recompute import ilp
from megatron_epp.planner.recompute.choices import diagonal_counts, freed_bytes, full_layers
from megatron_epp.planner.recompute.uniform import strict
from megatron_epp.planner.registry import PLANNERS
from tests.planner.cases import mixture, prepared


@pytest.mark.parametrize("seed", range(8))
def test_recompute_by_kind_against_every_choice(seed) -> None:
    """Two kinds, few layers, strict orders: the program by kind against all choices of layers per
    slot, kind and letter, each of which fits or not by the simulator's ledger."""
    random = Random(seed)
    pattern = random.choice(
        ("dense experts", "window dense", "experts dense", "2*experts attention")
    )
    layers = len(parse_kinds(pattern))
    cost = mixture(pattern, layers, 1)
    lengths = [random.randint(2_000, 12_000) for _ in range(3)]
    _, chunking, loads, kept, _ = prepared(cost, lengths, 3.0)
    in_flight_limit = group_by_group(chunking.sizes, cost.layout.stages)
    assert cost.layout.kinds.number == 2 and chunking.count <= 4

    def within(counts, budget) -> bool:
        moved = ChunkProblems(cost, chunking, loads).of(counts).ops.moved_bytes
        return bool(ilp.within(in_flight_limit, chunking.backward, moved, budget).all())

    free, _ = ilp._missing(
        in_flight_limit,
        kept.backward_order,
        kept.ops.moved_bytes,
        np.zeros(in_flight_limit.shape),
        np.zeros(1),
    )
    budget = np.array([free.max() * random.uniform(0.5, 0.95)])
    steps = full_layers(cost)
    found = diagonal_counts(
        ilp.Solver(),
        cost,
        loads,
        kept,
        in_flight_limit,
        integer=True,
        headroom_bytes=budget,
        steps=steps,
    )
    # What the program reckons with: bytes from F to B alone, so that is what judges, too.
    freed = [freed_bytes(cost, loads, letters, kind)[0] for kind, letters in enumerate(steps)]
    price = [float(cost.seconds.recompute((k, "f"), loads).mean()) for k in range(2)]

    def enough(grids) -> bool:
        saved = sum(grid * per for grid, per in zip(grids, freed, strict=True))
        missing, _ = ilp._missing(
            in_flight_limit, kept.backward_order, kept.ops.moved_bytes, saved, budget
        )
        return bool((missing <= 0).all())

    best = np.inf
    numbers = [range(int(count) + 1) for count in cost.layout.kinds.counts[:, 0]]
    for taken in itertools.product(*(numbers[k] for k in range(2) for _ in range(chunking.count))):
        grids = np.array(taken, float).reshape(2, 1, chunking.count)
        if enough(grids):
            best = min(best, sum(p * grid.sum() for p, grid in zip(price, grids, strict=True)))
    if found is None:
        assert best == np.inf
        return
    grids = [found.get((k, "f"), np.zeros((1, chunking.count))) for k in range(2)]
    assert enough(grids)
    ours = sum(p * grid.sum() for p, grid in zip(price, grids, strict=True))
    assert best * (1 - 1e-9) <= ours <= best * 1.021 + max(price)
    assert best > 0


def test_a_stage_alone_with_its_kind_recomputes_it() -> None:
    """DeepSeek's first layers lie on the first stage alone: they are recomputed where the memory
    asks for it, though no other stage on their diagonals has any."""
    cost = mixture("3*dense 9*experts", 12, 4, room_gib=1e6)
    lengths = [20_000, 15_000, 9_000, 8_000]
    _, chunking, loads, kept, in_flight_limit = prepared(cost, lengths, 12.0)
    full = every_layer("f", left_layers(cost, {}, chunking.count))
    least = list_schedule(
        ChunkProblems(cost, chunking, loads).of(full), strict(in_flight_limit)
    ).peak_bytes
    most = list_schedule(kept, strict(in_flight_limit)).peak_bytes
    budget = least + np.array([0.02, 1, 1, 1]) * (most - least)
    found = diagonal_counts(
        ilp.Solver(), cost, loads, kept, in_flight_limit, integer=False, headroom_bytes=budget
    )
    assert found is not None
    dense = cost.layout.kinds.names.index("dense")
    assert found[dense, "f"][0].max() == 3 and found[dense, "f"][1:].max() == 0


@pytest.mark.everything
def test_two_kinds_that_hardly_differ_give_the_plan_of_one() -> None:
    """Alike figures are one kind; figures that differ by a millionth are two, and take as long."""
    lengths = [30_000, 12_000, 9_000] + [1_500] * 12
    one = mixture("8*dense", 8, 4, room_gib=0.7, logits_held=False)
    figures = layer_coefficients(one.layout.profile)
    token = figures.layer_seconds[Kind.FORWARD]
    slower = dataclasses.replace(token, per_token=token.per_token * (1 + 1e-6))
    seconds = {**figures.layer_seconds, Kind.FORWARD: slower}
    other = dataclasses.replace(figures, layer_seconds=seconds)
    alike, apart = (
        one.replace(
            profile=one.layout.profile.with_kinds({"a": figures, "b": b}),
            layer_kinds=("a", "b") * 4,
        )
        for b in (figures, other)
    )
    assert (alike.layout.kinds.number, apart.layout.kinds.number) == (1, 2)
    options = Options(levers=ALL - {"offload"})
    plans = [PLANNERS["epp"](lengths, cost, options) for cost in (one, alike, apart)]
    assert str(plans[0].plan) == str(plans[1].plan)
    assert plans[2].seconds == pytest.approx(plans[0].seconds, rel=0.02)
    assert plans[0].recompute_ratio > 0


def test_windows_bring_long_documents_nearer_to_short_ones() -> None:
    """Slices are cut by the mixture's own cost: with full attention the last of four equal slices
    is short; with windows in three of four layers it is longer, and with windows alone equal."""
    lengths = np.array([60_000])
    last = []
    for pattern in ("4*dense", "3*window dense", "4*window"):
        rates = rates_of(mixture(pattern, 4, 2))
        points = equal_points(60_000, 4, rates)
        seconds = rates.document_seconds(points[1:]) - rates.document_seconds(points[:-1])
        assert seconds == pytest.approx(np.full(4, rates.document_seconds(lengths) / 4), rel=1e-3)
        last.append(int(points[-1] - points[-2]))
    assert last[0] < last[1] < last[2] and last[2] == pytest.approx(15_000, rel=0.01)
