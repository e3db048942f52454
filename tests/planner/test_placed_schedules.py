"""Schedules of ranks with several stages: their laws, and the rule table's."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.analytic import without_states
from megatron_epp.cost.build import named_cost
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.slicing import Spans
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.list_scheduler import Schedule, list_schedule
from megatron_epp.planner.order.policies import warm_up_policy
from megatron_epp.planner.order.problem import ChunkProblems, ScheduleProblem, loads_of
from megatron_epp.planner.order.replay import replayed
from megatron_epp.planner.published.schedules import packed, zb_v_order
from megatron_epp.planner.registry import planner_of
from megatron_epp.sim import engine
from megatron_epp.sim.engine import OpArrays, Orders, run
from megatron_epp.sim.rule_arrays import needs_for


def work(stages: int, chunks: int, forward: float = 1.0, held: float = 1.0) -> OpArrays:
    """Of equal ops: F 1, B 2, I 1, W 1; a chunk holds ``held`` from F to B or W."""
    seconds = np.ones((4, stages, chunks)) * np.array([forward, 2, 1, 1])[:, None, None]
    moved = np.zeros((4, 2, stages, chunks))
    moved[0, 0] = held  # F makes it
    moved[1, 1] = held  # B frees it
    moved[3, 1] = held  # or W
    nothing = np.full(chunks, -1)
    links = np.zeros((2, max(1, stages - 1), chunks))
    return OpArrays(seconds, links, 0.0, moved, np.zeros(stages), nothing)


def placement(name: str, ranks: int) -> tuple[int, ...]:
    once = tuple(range(ranks))
    return {"one": once, "interleaved": once + once, "wave": once + once[::-1]}[name]


def play(
    ranks: int, chunks: int, name: str, room: float = np.inf, **how
) -> tuple[Schedule, OpArrays]:
    place = placement(name, ranks)
    order = np.arange(chunks)
    warm = np.arange(ranks, 0, -1) * (len(place) // ranks) + (ranks if len(place) > ranks else 0)
    made = work(len(place), chunks)
    settings = {"split": False, "deep": True, "strict": False} | how
    problem = ScheduleProblem(made, order, order, np.full(ranks, room), place)
    return list_schedule(problem, warm_up_policy(place, chunks, warm, **settings)), made


def busy(found: Schedule) -> np.ndarray:
    return (found.stop - found.start).sum(axis=1)


def test_interleaving_shrinks_the_bubble_and_splitting_more() -> None:
    plain, _ = play(4, 12, "one")
    # Half a stage each: ops of the same length, twice as many.
    twice, _ = play(4, 12, "interleaved")
    assert plain.seconds == 36 + 9 and twice.seconds / 72 < 0.95 * plain.seconds / 36
    split, _ = play(4, 12, "one", split=True)
    assert split.seconds < plain.seconds


# The rank of every stage: all on one, a stage alone beside them, a V, interleaved, three on one.
PLACES = ((0, 0, 0), (1, 0, 1, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (2, 0, 0, 1, 0), (1, 0))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_the_scheduler_needs_what_the_rule_table_needs(place, cut: bool, seed: int) -> None:
    """Its orders, played by the rules, take what it says, to the last bit: ops, messages, bytes."""
    problem = random_problem(place, cut, seed)
    ranks, count = max(place) + 1, problem.chunks
    warm = np.random.default_rng(seed).integers(1, 2 * count, ranks)
    for split in (False, True):
        for deep in (False, True):
            policy = warm_up_policy(place, count, warm, split=split, deep=deep, strict=False)
            found = list_schedule(problem, policy)
            sizes = np.bincount(place) * ((3 if split else 2) + 2 * cut) * count
            ran = np.arange(found.kinds.shape[1]) < sizes[:, None]
            stages = found.stages if found.stages.size else np.argsort(place)[:, None] + 0 * ran
            orders = Orders(
                found.kinds[ran],
                found.chunks[ran].astype(np.int64),
                stages[ran].astype(np.int64),
                np.concatenate(([0], np.cumsum(sizes))),
                np.array(place),
            )
            simulated = run(orders, problem.ops, needs_for(cut))
            assert found.seconds == simulated.seconds < np.inf
            assert (found.start[ran] == simulated.start).all()
            assert (found.stop[ran] == simulated.stop).all()
            assert found.peak_bytes == pytest.approx(simulated.peak, rel=1e-12)
            again = replayed(problem, found)
            assert again.seconds == found.seconds
            assert (again.start[ran] == found.start[ran]).all()
            assert again.peak_bytes == pytest.approx(found.peak_bytes, rel=1e-12)


def test_orders_without_halves_need_no_arrays_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that never splits a backward has seconds of F and B alone. The loop runs as Python
    here, which notices an index past them; compiled, it read and wrote whatever lay there."""
    place = (0, 1, 1, 0)
    problem = random_problem(place, False, 7)
    policy = warm_up_policy(place, 9, np.array([4, 4]), split=False, deep=False, strict=False)
    found = list_schedule(problem, policy)
    ops = problem.ops
    whole = ops._replace(seconds=ops.seconds[:2], moved_bytes=ops.moved_bytes[:2])
    monkeypatch.setattr(engine, "run_arrays", engine.run_arrays.py_func)
    again = replayed(dataclasses.replace(problem, ops=whole), found)
    assert again.seconds == found.seconds
    assert again.peak_bytes == pytest.approx(found.peak_bytes, rel=1e-12)


def random_problem(place, cut: bool, seed: int) -> ScheduleProblem:
    """Two cut documents of three slices and three whole ones; everything else is random."""
    random = np.random.default_rng(seed)
    stages, group = len(place), np.array([0, 0, 0, 1, 1, 1, 2, 3, 4])
    number, kinds = np.arange(9), 6 if cut else 4
    earlier = np.where(np.append(False, group[1:] == group[:-1]), number - 1, -1)
    moved = random.uniform(0.0, 1.0, (kinds, 2, stages, 9))
    moved[1, 1], moved[2, 1] = moved[0, 0] + moved[1, 0], moved[0, 0] + moved[2, 0]
    links = random.uniform(0.0, 0.5, (3 if cut else 2, stages if cut else stages - 1, 9))
    ops = OpArrays(
        random.uniform(0.1, 2.0, (kinds, stages, 9)), links, 0.1, moved, np.zeros(stages),
        earlier,
    )  # fmt: skip
    last = np.array([np.flatnonzero(group == one).max() for one in group])
    backward = np.concatenate([np.flatnonzero(group == one)[::-1] for one in range(5)])
    room = random.uniform(3.0, 12.0, max(place) + 1)
    return ScheduleProblem(ops, backward, last, room, place)


@pytest.mark.parametrize("place", [(0, 1, 1, 0), (1, 0, 0, 1), (2, 0, 1, 1, 0, 2), (0, 0)])
@pytest.mark.parametrize("chunks", [1, 3, 4, 9])
def test_the_papers_order_of_a_v_has_no_bubble(place: tuple[int, ...], chunks: int) -> None:
    """Where F, I and W take as long, and there are chunks enough to fill the V; and it holds no
    more than 1F1B, two stages' ops for each rank."""
    ranks, numbers = len(place) // 2, np.arange(chunks)
    chunking = Chunking(
        Spans(numbers, 0 * numbers, 0 * numbers + 1), numbers, np.arange(chunks + 1),
        0 * numbers + 1, 0 * numbers + 1, 0 * numbers - 1, 0 * numbers,
    )  # fmt: skip
    order = zb_v_order(chunking, place)
    problem = ScheduleProblem(
        work(2 * ranks, chunks), numbers, numbers, np.full(ranks, np.inf), place
    )
    played = replayed(problem, order)
    for rank in range(ranks):
        ran = [*zip(played.kinds[rank], played.chunks[rank], played.stages[rank], strict=True)]
        own = [stage for stage, at in enumerate(place) if at == rank]
        assert sorted(ran) == [(k, c, s) for k in (0, 2, 3) for c in range(chunks) for s in own]
    assert played.seconds >= busy(played).max()
    assert played.peak_bytes.max() <= 2 * ranks
    if chunks >= 2 * ranks - 1:
        # The last rank of the V begins after its forerunners' first forwards.
        assert played.seconds == 6 * chunks + ranks - 1
        assert (played.stop.max(axis=1) - played.start.min(axis=1) == busy(played)).all()


def test_a_v_does_not_lose_to_zb_v_within_its_memory() -> None:
    """Eight documents of 4K on two stages; it took 3% more."""
    even = named_cost("llama3-8b", "h100-80g", pp=2, zero=1, topology="nodes")
    even = even.replace(profile=without_states(even.layout.profile))
    in_v = placed_cost(even.replace(device_budget_bytes=(1e15,) * 2), "v")
    assert in_v is not None
    options = Options(context=4096, effort=1)
    lengths = open_corpus("wlb", 4096).batch(0, 8)
    batch = SortedBatch.of(lengths)
    chunking, _, _ = next(packed(batch, in_v, options))
    problem = ChunkProblems(in_v, chunking, loads_of(chunking, batch.lengths)).of({})
    theirs = replayed(problem, zb_v_order(chunking, in_v.layout.place))
    budget = (float(theirs.peak_bytes.max()),) * 2
    tight = in_v.replace(device_budget_bytes=budget)
    ours = planner_of("epp")(lengths, tight, options)
    assert ours.fits
    assert ours.seconds <= theirs.seconds * (1 + 1e-9)
