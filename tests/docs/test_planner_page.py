"""docs/how/planner.md explains every part of the line ``how`` of `plan`, and every lever."""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.placement import named_placement
from megatron_epp.planner.choose.choice import with_placement
from megatron_epp.planner.chunks.params import UNCUT, ChunkingParams
from megatron_epp.planner.epp import planner as epp
from megatron_epp.planner.epp.uniform_search import EVERY_CHUNK_ALIKE
from megatron_epp.planner.options import ALL, LEVERS, Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.policies import PolicyParams, late_splits
from megatron_epp.planner.published import schedules
from megatron_epp.planner.published.infinipipe import planner as infinipipe

PAGE = Path(__file__).parents[2] / "docs" / "how" / "planner.md"
CHUNKINGS = (
    ChunkingParams(17.9, cut=1.25, extra_bins=2, front=1, back=1, reverse=True),
    ChunkingParams(17.9, cut=UNCUT, extra_bins=-1, ramp=20, bare=True, local=1.0),
)
POLICIES = (
    PolicyParams(strict=True, lead=2, warm=1.5, deep=False),
    PolicyParams(strict=False, split=True),
    PolicyParams(strict=False, split=True, held=4.0, patience=0.6, lead=-1),
    *late_splits(PolicyParams(strict=False)),
)
BATCH = SortedBatch.of([8000, 5000, 3000, *[900] * 12])
OPTIONS = Options(context=16384, effort=0, levers=ALL)


def costs(placement: str) -> Iterator[Cost]:
    """Two ranks with ample memory, and with less, down to what states alone take."""
    cost = named_cost("llama3-8b", "h100-80g", pp=2, tp=8)
    profile = dataclasses.replace(cost.layout.profile, host_bytes_per_second=1e12)
    cost = cost.replace(profile=profile, host_budget_bytes=64 * 2**30)
    if placement != "even":
        cost = with_placement(cost, named_placement(placement, 2))
    yield cost
    for gib in (4.0, 1.0, 0.01):
        most = max(cost.states_of_ranks) + gib * 2**30
        yield cost.replace(device_budget_bytes=(most, most))


@cache
def notes_of_published_drafts() -> frozenset[str]:
    """The lines of all drafts but its own that ``epp`` may take, whichever is the fastest."""
    notes = set()
    for placement in ("even", "interleaved 2", "v"):
        for cost in costs(placement):
            for draft in epp._others(cost, OPTIONS):
                row = draft.func.__self__
                notes.add(draft(BATCH, cost, OPTIONS).draft.note)
                for chunking, chunks, _ in row.chunkings(BATCH, cost, OPTIONS):
                    for _, order in row.policies(chunking, cost, True):
                        notes.add(f"schedule {row.name}, {chunks}; {order}")
            if placement == "even":
                notes.add(infinipipe.draft(BATCH, cost, OPTIONS).draft.note)
                notes.add(infinipipe._anything_that_fits(BATCH, cost, OPTIONS).draft.note)
    return frozenset(notes)


def without_numbers(text: str) -> str:
    text = re.sub(r"[0-9]+(\.[0-9]+)?%?(?![0-9A-Z])", "#", text)
    return text.replace("packs fewer", "packs more").replace("pack fewer", "packs more")


def unexplained(page: str) -> list[str]:
    """Return the parts of the line that no list of ``page`` has, and the levers without an item."""
    rows = re.findall(r"^- ((?:`[^`]+`(?:, )?)+): ", page, re.M)
    known = {without_numbers(word) for row in rows for word in re.findall(r"`([^`]+)`", row)}
    ends = [epp.LESS_MEMORY.removeprefix(", "), EVERY_CHUNK_ALIKE.removeprefix(", ")]
    lines = [*map(str, (*CHUNKINGS, *POLICIES)), *ends, *sorted(notes_of_published_drafts())]
    parts = dict.fromkeys(part for line in lines for part in re.split("[,;] ", line))
    return [part for part in (*parts, *LEVERS) if without_numbers(part) not in known]


def test_every_part_and_lever_has_an_item() -> None:
    assert unexplained(PAGE.read_text()) == []


def test_a_missing_row_is_found() -> None:
    page = PAGE.read_text()
    gone = "".join(row for row in page.splitlines(True) if "- `wsplit`:" not in row)
    assert unexplained(gone) == ["wsplit"]
    assert unexplained(page.replace("documents left whole", "documents whole")) == [
        "documents left whole"
    ]


def test_a_line_names_the_published_schedule_that_was_taken() -> None:
    first = {re.split("[,;] ", note)[0] for note in notes_of_published_drafts()}
    names = {row.name for row in schedules.ROWS} - {"packing"} | {"infinipipe"}
    assert first == {f"schedule {name}" for name in names}
    every = " ".join(notes_of_published_drafts())
    for part in ("recomputed in every stage", "offloaded in every stage", "all layers recomputed"):
        assert part in every


@pytest.mark.parametrize("row", schedules.ROWS, ids=lambda row: row.name)
def test_epp_says_which_schedule_was_faster_than_its_search(row, monkeypatch) -> None:
    placement = {"zb-v": "v"}.get(row.name, "even")
    cost = next(costs(placement))
    slow = epp._searched(BATCH, cost, OPTIONS)[:1]
    slow = [dataclasses.replace(slow[0], seconds=1e9)]
    monkeypatch.setattr(epp, "_searched", lambda *_: slow)
    monkeypatch.setattr(epp.infinipipe, "draft", lambda *_: None)
    monkeypatch.setattr(epp, "_others", lambda *_: [row.draft])
    assert epp.draft(BATCH, cost, OPTIONS).draft.note.startswith(f"schedule {row.name}, ")
