"""How hard a search looks where nobody says, by numbers of the batch."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.__main__ import main
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.planner import registry
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.planner.epp import planner, preparation
from megatron_epp.planner.options import EFFORT, MANY_EFFORT, Options, with_effort
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import plan_step


@pytest.mark.parametrize(
    ("documents", "seconds", "effort"),
    [
        (64, 5.0, EFFORT),
        (2048, 50.0, EFFORT),
        (4096, 90.0, 2 * EFFORT),
        (10**6, 90.0, MANY_EFFORT),
        (10**6, 0.5, 2),
        (64, 0.5, 2),
        (64, 0.1, 0),
    ],
)
def test_effort_by_documents_and_seconds(documents: int, seconds: float, effort: int) -> None:
    assert with_effort(Options(), documents, seconds).effort == effort
    assert with_effort(Options(effort=3), documents, seconds).effort == 3, "the user's word"


def test_effort_of_a_rank_does_not_depend_on_its_stages() -> None:
    cost = named_cost("llama3-8b", "h100-80g", pp=4, tp=8)
    placed = placed_cost(cost, "interleaved 4")
    assert placed is not None
    batch = SortedBatch.of([8000] * 24)
    efforts = [registry._with_effort(batch, each, Options()).effort for each in (cost, placed)]
    assert efforts == [3, 3]


@pytest.fixture
def efforts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every search from now on."""
    seen: list[int] = []
    begin = preparation.Effort.__init__

    def spy(effort: preparation.Effort, units: int) -> None:
        seen.append(units)
        begin(effort, units)

    monkeypatch.setattr(preparation.Effort, "__init__", spy)
    return seen


def test_commands_plan_with_it(tmp_path: Path, efforts: list[int]) -> None:
    words = ["--model", "gpt-7b", "--device", "a100-80g", "--pp", "2", "--tp", "8"]
    words += ["--context", "16384", "--vocab-parallel", "off", "--placement", "even"]

    def planned(documents: int, *more: str) -> set[int]:
        efforts.clear()
        lengths = tmp_path / "lengths.txt"
        lengths.write_text("4000\n" * documents)
        more = ("--global-batch-size", str(documents), *more)
        assert (
            main(["plan", "--lengths", str(lengths), *words, *more, "-o", str(tmp_path / "p")]) == 0
        )
        return set(efforts)

    assert planned(2) == {0}
    assert planned(2, "--effort", "1") == {1}
    assert planned(60) == {EFFORT}


@pytest.mark.everything
def test_many_replicas_share_no_effort(efforts: list[int]) -> None:
    cost = named_cost("gpt-7b", "a100-80g", pp=2, cp=2, dp=8)
    batch = open_corpus("wlb", 16384).batch(1, 16)
    plan_step(batch, cost, Options(effort=2), "epp", 8)
    assert set(efforts) == {2}


@pytest.mark.everything
def test_searches_in_earnest_where_a_published_schedule_wins_in_tight_memory(
    monkeypatch: pytest.MonkeyPatch, efforts: list[int]
) -> None:
    """Then the search missed what fits well. Where memory is ample there is nothing to miss."""
    batch, options = open_corpus("wlb", 32768).batch(3, 40), Options(context=32768, effort=EFFORT)
    searched = planner._searched

    def weak(batch: Any, cost: Any, options: Options) -> list[ScoredDraft]:
        """Three times too slow, but for much effort."""
        times = 1 if options.effort == MANY_EFFORT else 3
        found = searched(batch, cost, options)
        return [dataclasses.replace(each, seconds=times * each.seconds) for each in found]

    for budget_gib, tight in ((24, True), (80, False)):
        cost = named_cost("gpt-13b", "a100-80g", pp=4, cp=4, zero=3, memory_budget_gib=budget_gib)
        right = PLANNERS["epp"](batch, cost, options)
        assert (right.recompute_ratio > 0) == tight
        assert MANY_EFFORT not in efforts
        with monkeypatch.context() as patched:
            patched.setattr(planner, "_searched", weak)
            efforts.clear()
            found = PLANNERS["epp"](batch, cost, options)
            assert (MANY_EFFORT in efforts) == tight
            assert (found.seconds <= right.seconds * 1.01) == tight
            efforts.clear()
            PLANNERS["epp"](batch, cost, dataclasses.replace(options, effort=1))
            assert MANY_EFFORT not in efforts, "the user's word"
