"""What a search computes once, or leaves out, and plans are the same."""

import dataclasses
import itertools

import numpy as np
import pytest

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import COMPUTE, FULL, KIND_CODE, OFFLOAD, Kind, PlanError, rules_for
from megatron_epp.planner.block_table import BlockLoads, tables_of
from megatron_epp.planner.chunks.block import build_block
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.params import ChunkingParams, build_chunks
from megatron_epp.planner.epp.search import Search
from megatron_epp.planner.options import ALL, TRAINING_LEVERS, Options
from megatron_epp.planner.order.emit import Draft, SortedBatch
from megatron_epp.planner.order.emit_block import emit_block
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.problem import ChunkProblems, loads_of, rates_of, with_unrecomputed
from megatron_epp.planner.order.warmup import shrinking_in_flight
from megatron_epp.planner.published.infinipipe import planner as infinipipe
from megatron_epp.planner.recompute import ilp
from megatron_epp.planner.recompute.uniform import strict
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.sim.inputs import op_arrays

K = 1024
MODELS = {
    "dense": ("gpt-13b", {"pp": 4, "cp": 8}, False),
    "vocabulary": ("llama3-8b", {"pp": 4, "cp": 8}, True),
    "kinds": ("nemotron-h-8b", {"pp": 4, "tp": 8}, False),
    "experts": ("qwen3-30b-a3b", {"pp": 2, "tp": 4, "dp": 2, "ep": 8}, False),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [1, 2])
def test_tables_by_recompute_are_those_made_anew(name: str, width: int) -> None:
    """In any order of the counts, with offloaded layers among them, and without I and W."""
    model, degrees, vocabulary = MODELS[name]
    cost = named_cost(model, "a100-80g", **degrees, zero=1).with_vocabulary(vocabulary)
    batch, rates = SortedBatch.of(open_corpus("wlb", 32 * K).batch(3, 40)), rates_of(cost)
    arguments = ChunkingParams(12.0), batch.lengths, rates, 10**9, cost.multiple
    chunking = build_chunks(*arguments) if width == 1 else build_block(*arguments, width)
    loads = loads_of(chunking, batch.lengths, cost.multiple)
    assert isinstance(loads, BlockLoads) == (width > 1)
    random, of_kind = np.random.default_rng(0), cost.layout.kinds.counts[0][:, None]

    def some(mode: str) -> dict[tuple[int, str], np.ndarray]:
        shape = cost.layout.stages, chunking.count
        return {(0, mode): np.floor(random.random(shape) * (of_kind + 1))}

    rules = rules_for(vocabulary)
    shared, whole = (ChunkProblems(cost, chunking, loads, split) for split in (False, True))
    for counts in ({}, some(FULL), some(OFFLOAD), {}, some("m"), some(FULL)):
        table = tables_of(cost, loads).of_counts(with_unrecomputed(cost, counts, chunking.count))
        anew = op_arrays(table, loads, rules)
        patched, without = whole.of(counts).ops, shared.of(counts).ops
        for field in anew._fields:
            assert np.array_equal(getattr(patched, field), getattr(anew, field)), field
        for kind in set(COMPUTE) & set(rules) - {Kind.INPUT, Kind.WEIGHT}:
            code = KIND_CODE[kind]
            assert np.array_equal(without.seconds[code], anew.seconds[code])
            assert np.array_equal(without.moved_bytes[code], anew.moved_bytes[code])


@pytest.mark.parametrize("name", MODELS)
def test_tables_of_several_chunkings_at_once_are_those_of_each(name: str) -> None:
    """Bit for bit, where nothing is recomputed and where something is; of documents that one rank
    computes alone and of none, and of devices that differ."""
    model, degrees, vocabulary = MODELS[name]
    cost = named_cost(model, "a100-80g", **degrees, zero=1).with_vocabulary(vocabulary)
    if name == "dense":
        cost = cost.replace(
            profile=dataclasses.replace(cost.layout.profile, rank_slowness=(1.0, 1.0, 1.2, 1.1))
        )
    batch, rates = SortedBatch.of(open_corpus("wlb", 32 * K).batch(3, 40)), rates_of(cost)
    ranks, local = cost.layout.cp, float(cost.layout.cp > 1)
    several = [
        ChunkingParams(12.0, local=local),
        ChunkingParams(7.0, cut=0.5),
        ChunkingParams(3.0, local=2 * local, reverse=True),
    ]
    chunkings = [
        build_chunks(each, batch.lengths, rates, 10**9, cost.multiple, ranks) for each in several
    ]
    loads = [loads_of(each, batch.lengths, cost.multiple) for each in chunkings]
    assert {each.local is None for each in loads} == ({True, False} if ranks > 1 else {True})
    together = ChunkProblems.of_each(cost, chunkings, loads)
    for problems, chunking, own in zip(together, chunkings, loads, strict=True):
        alone = ChunkProblems(cost, chunking, own)
        half = np.tile(cost.layout.kinds.counts[0][:, None] // 2, (1, chunking.count))
        for counts in ({}, {(0, FULL): half.astype(np.float64)}):
            work, expected = problems.of(counts), alone.of(counts)
            for field in expected.ops._fields:
                found, right = getattr(work.ops, field), getattr(expected.ops, field)
                assert np.array_equal(found, right), field
            assert work.ops.seconds.flags.c_contiguous
            assert np.array_equal(work.backward_order, expected.backward_order)


def test_what_is_alike_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that several parameters lead to; and plans are the same."""
    cost, batch = named_cost("gpt-13b", "a100-80g", pp=4, cp=8), open_corpus("wlb", 96 * K)
    prepare, prepared = Search.prepare, []
    monkeypatch.setattr(
        Search, "prepare", lambda *args, **how: prepared.append(0) or prepare(*args, **how)
    )

    def plan() -> tuple[str, int]:
        prepared.clear()
        made = PLANNERS["epp"](batch.batch(30, 96), cost, Options(context=96 * K, effort=1))
        return str(made.plan), len(prepared)

    once, some = plan()
    numbers = itertools.count()
    monkeypatch.setattr(Chunking, "contents", property(lambda chunking: (next(numbers),)))
    anew, every = plan()
    assert once == anew
    assert some < every


def test_infinipipe_is_given_up_where_it_cannot_win() -> None:
    """And only there."""
    for number, pp, documents in ((30, 4, 64), (31, 8, 96), (3, 2, 40)):
        cost = named_cost("gpt-13b", "a100-80g", pp=pp, cp=8)
        batch = SortedBatch.of(open_corpus("wlb", 96 * K).batch(number, documents))
        options = Options(context=96 * K)
        drafted = infinipipe.draft(batch, cost, options)
        assert infinipipe.draft(batch, cost, options, drafted.seconds / 2) is None
        for times in (1.001, 1.1):
            found = infinipipe.draft(batch, cost, options, drafted.seconds * times)
            assert found is not None and found.seconds == drafted.seconds


@pytest.mark.parametrize("levers", [TRAINING_LEVERS - {"wsplit"}, ALL])
def test_programs_that_decide_nothing_are_not_solved(
    levers: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = named_cost("gpt-13b", "a100-80g", pp=4, cp=8, zero=3)
    batch = open_corpus("wlb", 96 * K).batch(30, 96)
    solve, solved = ilp.Solver.run, []
    monkeypatch.setattr(ilp.Solver, "run", lambda *args: solved.append(0) or solve(*args))

    def plan() -> tuple[str, int]:
        solved.clear()
        made = PLANNERS["epp"](batch, cost, Options(context=96 * K, levers=levers, effort=1))
        return str(made.plan), len(solved)

    some, solved_some = plan()
    monkeypatch.setattr(Search, "_of_interest", lambda search: np.inf)
    every, solved_every = plan()
    assert some == every
    assert solved_some < 0.8 * solved_every


def test_a_draft_that_cannot_run_is_refused() -> None:
    """Without walking it in Python: by playing it."""
    cost = named_cost("gpt-7b", "a100-80g", pp=2, cp=8)
    batch = SortedBatch.of([5000, 3000, 1000])
    chunking = build_chunks(ChunkingParams(3.0), batch.lengths, rates_of(cost), 10**9)
    loads = loads_of(chunking, batch.lengths, cost.multiple)
    limit = shrinking_in_flight(chunking.sizes, 2)
    schedule = list_schedule(ChunkProblems(cost, chunking, loads).of({}), strict(limit))
    draft = Draft(chunking, {}, schedule.kinds, schedule.chunks)
    emit_block("test", batch, draft, cost, Options())
    backwards, twice = schedule.kinds[:, ::-1], schedule.chunks.copy()
    twice[0, 0] = chunking.count - 1
    for bad in (
        dataclasses.replace(draft, kinds=backwards, chunks=schedule.chunks[:, ::-1]),
        dataclasses.replace(draft, chunks=twice),
    ):
        with pytest.raises(PlanError, match="stage 0"):
            emit_block("test", batch, bad, cost, Options())
