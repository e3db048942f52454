"""Blocks of replicas in lockstep: what is dealt, what it costs, what it may hold."""

import dataclasses
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.host_memory import host_peak_bytes
from megatron_epp.ir import Step, StepPart, check, check_op_templates
from megatron_epp.planner.block_table import block_seconds
from megatron_epp.planner.chunks.block import BlockChunking, build_block, folded
from megatron_epp.planner.chunks.params import TAPERS, ChunkingParams, build_chunks
from megatron_epp.planner.options import ALL, TRAINING_LEVERS, Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.emit_block import member_plans, tables_in_step
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import policies, policy_of
from megatron_epp.planner.order.problem import ChunkProblems, loads_of, rates_of
from megatron_epp.planner.order.warmup import shrinking_in_flight
from megatron_epp.planner.registry import COMPARED
from megatron_epp.planner.replicas import evaluation_step, plan_part, plan_step
from megatron_epp.sim.in_step import in_step
from megatron_epp.sim.play import play
from tests.planner.cases import LENGTHS, machine, machines, mixture
from tests.planner.test_deal import heavy_tailed

WIDTHS = st.integers(2, 4)


def require_runs(step: Step, lengths: list[int], width: int) -> None:
    assert step.lockstep == width and step.lengths == tuple(lengths)
    assert Step.parse(str(step)) == step
    check_op_templates(step)
    for plan in step.plans:
        check(plan)
    for block in range(0, len(step.plans), width):
        for number in range(len(step.plans[block].chunks)):
            assert any(plan.chunks[number].spans for plan in step.block(block))


@pytest.mark.parametrize("planner", COMPARED)
@pytest.mark.parametrize(("width", "replicas"), [(2, 2), (2, 4), (3, 3)])
def test_every_planner_plans_blocks(planner, width, replicas) -> None:
    lengths = heavy_tailed(1, 40)
    cost = machine(pp=3, room_gib=20)
    options = Options(effort=int(replicas == 2), lockstep=width)
    made = plan_step(lengths, cost, options, planner, replicas)
    require_runs(made.step, lengths, width)
    assert [found.plan for found in made.planned] == list(made.step.plans)
    assert all(found.fits and found.planner == planner for found in made.planned)
    for block in range(0, replicas, width):
        assert len({found.seconds for found in made.planned[block : block + width]}) == 1
    again = plan_step(lengths, cost, options, planner, replicas)
    assert again.step.digest == made.step.digest


@pytest.mark.parametrize("documents", [2, 3, 4, 9])
def test_nobody_is_without_a_document(documents) -> None:
    """However few there are, and if one alone has all the work."""
    lengths = [60_000, *([7] * (documents - 1))]
    for planner in COMPARED:
        options = Options(effort=0, lockstep=2)
        made = plan_step(lengths, machine(pp=2), options, planner, 2)
        require_runs(made.step, lengths, 2)
        require_runs(evaluation_step(lengths, machine(pp=2), options, 2), lengths, 2)


@pytest.mark.parametrize("lengths", [[9000], [5, 9000], [5, 1, 1]])
@pytest.mark.parametrize(("width", "replicas"), [(1, 4), (2, 4), (4, 4)])
def test_fewer_documents_than_replicas(lengths, width, replicas) -> None:
    """Those without any run empty chunks; lockstep groups with and without some are balanced."""
    cost = machine(pp=2)
    for planner in COMPARED:
        options = Options(effort=0, lockstep=width)
        step = plan_step(lengths, cost, options, planner, replicas).step
        evaluation = evaluation_step(lengths, cost, options, replicas)
        for one in (step, evaluation):
            assert one.lengths == tuple(lengths) and one.lockstep == width
            assert sum(map(bool, one.assignments)) == len(lengths)
            assert Step.parse(str(one)) == one
            check_op_templates(one)
            for replica, (plan, held) in enumerate(zip(one.plans, one.assignments, strict=True)):
                check(plan)
                assert plan.chunks and (held or not any(chunk.spans for chunk in plan.chunks))
                part = one.part(replica)
                assert StepPart.parse(str(part)) == part
        part = plan_part(lengths, cost, options, planner, replicas, replicas - 1)
        assert part.plans == step.part(replicas - 1).plans


def test_odd_blocks() -> None:
    with pytest.raises(ValueError, match="lockstep 2: expected a divisor of the 3 replicas"):
        plan_step([5, 1, 1], machine(), Options(lockstep=2), "epp", 3)
    with pytest.raises(ValueError, match="lockstep 2: expected a divisor of the 3 replicas"):
        evaluation_step([5, 1, 1], machine(), Options(lockstep=2), 3)
    with pytest.raises(ValueError, match="lockstep 0: expected at least 1"):
        Options(lockstep=0)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, WIDTHS, st.data())
def test_every_token_at_one_position_of_one_replica(lengths, width, data) -> None:
    """Of chunks built for a block, and of others folded; groups are closed, nothing is lost."""
    lengths = np.array(sorted(lengths + [9] * width, reverse=True))
    rates = rates_of(machine())
    params = ChunkingParams(
        data.draw(st.floats(1, 30)),
        cut=data.draw(st.sampled_from((0.5, 1.0, 1.5))),
        front=data.draw(st.integers(0, len(TAPERS) - 1)),
        back=data.draw(st.integers(0, len(TAPERS) - 1)),
        reverse=data.draw(st.booleans()),
        ramp=data.draw(st.sampled_from((0, 0, 7))),
    )
    most = int(lengths[0]) + data.draw(st.integers(0, 5000))
    built = build_block(params, lengths, rates, most, 1, width)
    other = folded(build_chunks(params, lengths, rates, most), width, rates)
    assert isinstance(other, BlockChunking)
    for block in (built, other):
        seen: Counter[int] = Counter()
        for member in block.members:
            assert member.count == block.count and (member.starts == block.starts).all()
            assert (member.tokens <= block.tokens).all() and member.tokens.max() <= most
            assert len(member.spans) > 0
            for document in np.unique(member.spans.document):
                mine = member.spans.document == document
                seen[int(document)] += int(member.spans.tokens[mine].sum())
                at = member.chunk[mine][np.argsort(member.spans.start[mine])]
                assert (np.diff(at) == 1).all(), "slices are neighbours, in order"
                assert len(np.unique(block.group[at])) == 1, "and of one group"
        assert seen == Counter(dict(enumerate(lengths.tolist())))
        assert (block.tokens > 0).all()
        mixed = block.arranged(np.arange(block.groups)[::-1])
        assert [m.tokens.sum() for m in mixed.members] == [m.tokens.sum() for m in block.members]


@settings(deadline=None, max_examples=25)
@given(LENGTHS, machines(), WIDTHS, st.integers(0, 2**16), st.booleans())
def test_what_a_block_may_hold_is_enough_for_each(lengths, cost, width, seed, split) -> None:
    """The schedule reckons with one memory for all: no replica ever holds more, by the simulator's
    exact ledger, and all take as long as the schedule says."""
    _require_bound(lengths, cost, width, seed, split)


@pytest.mark.parametrize(("pattern", "layers"), [("4*(dense window)", 8), ("latents 5*experts", 6)])
def test_so_with_layers_of_several_kinds(pattern, layers) -> None:
    for seed in range(4):
        cost = mixture(pattern, layers, 2)
        _require_bound(heavy_tailed(seed, 15), cost, 3, seed, bool(seed % 2))


def _require_bound(lengths, cost: Cost, width: int, seed: int, split: bool) -> None:
    random = Random(seed)
    batch = SortedBatch.of([*lengths, *[5] * width])
    params = ChunkingParams(random.uniform(1, 20), cut=random.choice((0.5, 1.0)))
    most = int(batch.lengths[0])
    chunking = build_block(params, batch.lengths, rates_of(cost), most, 1, width)
    loads = loads_of(chunking, batch.lengths)
    style = random.choice(list(policies(split, many=True)))
    letter = random.choice("fcm")
    grid = np.zeros((cost.layout.stages, chunking.count))
    for stage, layers in enumerate(cost.layout.kinds.counts[0]):
        grid[stage] = [random.randint(0, int(layers)) for _ in range(chunking.count)]
    counts = {(0, letter): grid}
    work = ChunkProblems(cost, chunking, loads).of(counts)
    in_flight_limit = shrinking_in_flight(chunking.sizes, cost.layout.stages)
    schedule = list_schedule(work, policy_of(style, work, in_flight_limit))
    draft = Draft(chunking, counts, schedule.kinds, schedule.chunks)
    most_bytes = schedule.peak_bytes * (1 + 1e-9) + 16 * chunking.count
    shares = member_plans(batch, draft, cost)
    for share, table in zip(shares, tables_in_step(shares, draft, cost), strict=True):
        played = play(share.plan, table)
        assert (played.peak_bytes - np.array(cost.memory.states_bytes) <= most_bytes).all()
        assert played.seconds == pytest.approx(schedule.seconds, rel=1e-9)


def test_the_slowest_counts_at_every_op() -> None:
    cost = machine(pp=2)
    lengths = np.array(sorted(heavy_tailed(3, 20), reverse=True))
    chunking = build_block(ChunkingParams(6.0), lengths, rates_of(cost), 10**9, 1, 2)
    loads = loads_of(chunking, lengths)
    tables = [
        cost.table_of(member, {(0, "k"): _all_layers(cost, chunking)}) for member in loads.members
    ]
    together = in_step(tables)
    for kind in tables[0].seconds:
        slowest = np.maximum(*(table.seconds[kind] for table in tables))
        for table in together:
            assert np.allclose(table.seconds[kind], slowest)
        assert (block_seconds(cost, kind, loads) == slowest).all()
        assert not np.array_equal(tables[0].seconds[kind], tables[1].seconds[kind])


def _all_layers(cost: Cost, chunking: BlockChunking) -> np.ndarray:
    return np.tile(np.array(cost.layout.layers, float)[:, None], (1, chunking.count))


def test_positions_are_alike() -> None:
    """With enough documents to choose from the slowest replica is hardly slower than the mean."""
    cost = machine(pp=4)
    rates = rates_of(cost)
    lengths = np.array(sorted(heavy_tailed(5, 300), reverse=True))
    for width in (2, 4):
        block = build_block(ChunkingParams(20.0, cut=0.8), lengths, rates, 10**9, 1, width)
        taken = np.stack(
            [rates.chunk_spans_seconds(m.spans, m.chunk, m.tokens, m.pairs) for m in block.members]
        )
        assert taken.max(axis=0).sum() < 1.03 * taken.mean(axis=0).sum()


@pytest.mark.everything
def test_the_price_of_lockstep() -> None:
    """Simulated: at 512 documents at most a twentieth, on a batch that no number was chosen on, all
    of them spread over the ranks, as they are in lockstep."""
    cost = machine(pp=4, room_gib=60)
    corpus = open_corpus("wlb", 65536)
    batch = corpus.batch(40, 512)
    levers = TRAINING_LEVERS - {"local"}
    free, locked = (
        plan_step(batch, cost, Options(levers=levers, lockstep=lockstep), "epp", 2)
        for lockstep in (1, 2)
    )
    assert free.seconds * 0.98 < locked.seconds < 1.05 * free.seconds


@pytest.mark.everything
def test_offload_has_room_for_each() -> None:
    lengths = heavy_tailed(9, 30)
    cost = machine(pp=2, room_gib=3)
    profile = dataclasses.replace(cost.layout.profile, host_bytes_per_second=5e10)
    cost = cost.replace(profile=profile, host_budget_bytes=4 * 2**30)
    made = plan_step(lengths, cost, Options(levers=ALL, effort=1, lockstep=2), "epp", 2)
    require_runs(made.step, lengths, 2)
    assert all(found.fits for found in made.planned)
    for plan in made.step.plans:
        assert max(host_peak_bytes(cost, plan)) <= cost.host_budget_bytes


def test_evaluation_within_a_budget() -> None:
    lengths = heavy_tailed(11, 20)
    cost = machine(pp=2, room_gib=8)
    step = evaluation_step(lengths, cost, Options(lockstep=2), 4, most=8000)
    require_runs(step, lengths, 2)
    assert all(plan.forward_only for plan in step.plans)
    assert max(chunk.tokens for plan in step.plans for chunk in plan.chunks) <= 8000
