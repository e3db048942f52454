"""Layouts for fewer devices, searched while training runs."""

import io
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.mcore.calibrate.profile_file import FILE_NAME
from megatron_epp.mcore.choose import start
from megatron_epp.mcore.choose.ahead import (
    AHEAD_FILE,
    LEAST_SECONDS_BETWEEN,
    SearchAhead,
    layout_kept_ahead,
    search_digest,
)
from megatron_epp.mcore.choose.choices import cost_models
from megatron_epp.mcore.choose.kept import CHOICES_FILE, TRACKER
from megatron_epp.mcore.choose.layouts import AllowedLayout, ChosenLayout
from megatron_epp.mcore.flags.config import LAYOUT_KEY
from megatron_epp.mcore.trainer import job
from tests.test_kinds import every_source, imports

# What searches and orders is imported by starts with --epp-layouts alone.
LATE = {f"megatron_epp.mcore.choose.{name}" for name in ("ahead", "rank_order", "search_layouts")}
SHAPE = Model("small", 4, 32, 128, 4, 2, 8, 128, gated=True)


def wanted(folder: Path, **changes: Any) -> Namespace:
    """Flags of a start that resumes from ``folder``."""
    (folder / "layouts").write_text("pp 2 # a comment\npp 1 ep 2\n")
    given = {"epp_layouts": str(folder / "layouts"), "epp_cost_model": None, "load": str(folder)}
    given |= {"finetune": False, "no_load_optim": None, "num_layers": 4, "rank": 0, "world_size": 4}
    return Namespace(**given | changes)


def measured(folder: Path, name: str, seconds: float) -> None:
    made = profile(SHAPE, device("cpu"), logits_held=False)
    made.slowed(seconds).save(str(folder / name))


def keep(folder: Path, args: Namespace, **layouts: ChosenLayout) -> None:
    entries = {number[1:]: json.loads(one.to_json()) for number, one in layouts.items()}
    kept = {"searched_for": search_digest(args, str(folder)), "layouts": entries}
    (folder / AHEAD_FILE).write_text(json.dumps(kept))


def test_a_start_takes_what_was_searched_for_it_and_nothing_else(tmp_path: Path, capsys) -> None:
    measured(tmp_path, FILE_NAME, 1.0)
    args, three = wanted(tmp_path), ChosenLayout(AllowedLayout(pp=2), 3, 2, 0.5)
    keep(tmp_path, args, _3=three, _4=ChosenLayout(AllowedLayout(ep=2), 4, 4, 0.5))
    assert layout_kept_ahead(args, 3) == three
    assert layout_kept_ahead(args, 2) is None
    assert (
        layout_kept_ahead(wanted(tmp_path, rank=1, world_size=3, load=f"{tmp_path}/"), 3) == three
    )
    assert layout_kept_ahead(wanted(tmp_path, num_layers=8), 3) is None  # another model
    assert layout_kept_ahead(wanted(tmp_path, epp_cost_model="analytic"), 3) is None
    again = tmp_path / "layouts again"
    again.write_text("pp 2\npp 1 ep 2\n")
    assert layout_kept_ahead(wanted(tmp_path, epp_layouts=str(again)), 3) == three  # the same ones
    again.write_text("pp 2\npp 1 ep 2\npp 3\n")
    assert layout_kept_ahead(wanted(tmp_path, epp_layouts=str(again)), 3) is None
    # Experts' optimizer loads with the ep of the checkpoint's run alone.
    (tmp_path / TRACKER).write_text("2")
    (tmp_path / CHOICES_FILE).write_text(json.dumps({LAYOUT_KEY: {"ep": 1}}))
    assert layout_kept_ahead(args, 3) == three and layout_kept_ahead(args, 4) is None
    # A refit is another cost model.
    measured(tmp_path, "epp-cost-model.from-000021.json", 2.0)
    assert next(cost_models(args)).endswith("from-000021.json")
    assert layout_kept_ahead(args, 3) is None
    keep(tmp_path, args, _3=three)
    measured(tmp_path, "epp-cost-model.from-000101.json", 3.0)
    assert layout_kept_ahead(args, 3) is None
    assert capsys.readouterr().out == ""
    for damaged in (
        "{",
        "[]",
        '{"searched_for": 1}',
        json.dumps({"searched_for": 1, "layouts": 1}),
    ):
        (tmp_path / AHEAD_FILE).write_text(damaged)
        assert layout_kept_ahead(args, 3) is None
    assert "of no use" in capsys.readouterr().out


class Ended:
    """A process that has ended with ``text``, or still runs."""

    def __init__(self, text: str):
        self.stdout, self.returncode, self.running = io.BytesIO(text.encode()), 1, True

    def poll(self) -> int | None:
        return None if self.running else self.returncode


def test_a_search_begins_again_where_the_cost_model_is_another_but_not_at_once(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    now, started = [0.0], []
    args = SimpleNamespace(save=str(tmp_path), epp_memory_budget_gib=None)
    setattr(args, LAYOUT_KEY, {"devices": 8, "ep": 1})
    search = SearchAhead(args, [], lambda: now[0])
    assert search.devices == [6, 4]  # of 8 less 4 nodes nothing is left

    def start() -> Ended:
        text = {"searched_for": "digest", "layouts": {"6": {}, "4": {}}}
        started.append(Ended(json.dumps(text) if len(started) != 1 else ""))
        return started[-1]

    monkeypatch.setattr(search, "_start", start)
    for _ in range(3):
        search.look(False)
    assert len(started) == 1 and not (tmp_path / AHEAD_FILE).exists()
    started[0].running = False
    with caplog.at_level("INFO"):
        search.look(False)
    assert "layouts for 4, 6 devices are searched ahead" in caplog.text
    assert json.loads((tmp_path / AHEAD_FILE).read_text())["searched_for"] == "digest"
    now[0] = LEAST_SECONDS_BETWEEN - 1
    search.look(True)
    search.look(False)
    assert len(started) == 1
    now[0] += 1
    search.look(False)  # what the refit before asked for
    assert len(started) == 2
    started[1].running = False
    search.look(False)
    assert "not searched ahead (the process ended with status 1)" in caplog.text
    now[0] += 2 * LEAST_SECONDS_BETWEEN
    search.look(False)
    assert len(started) == 2
    search.close()


@pytest.mark.parametrize("lost", [1, 2])
def test_nothing_is_searched_where_no_node_would_be_left(tmp_path: Path, monkeypatch, lost) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args = SimpleNamespace(save=str(tmp_path), epp_memory_budget_gib=None)
    setattr(args, LAYOUT_KEY, {"devices": 4 * lost, "ep": 1})
    search = SearchAhead(args, [])
    monkeypatch.setattr(search, "_start", lambda: Ended(""))
    search.look(False)
    assert (search._process is None) is (lost == 1) is (search.devices == [])
    search._process = None
    search.close()


def test_other_starts_import_and_read_nothing(monkeypatch) -> None:
    for module, source in every_source().items():
        early = {name for _, name, lazy in imports(source, module) if not lazy}
        found = {name for name in early if name.rpartition(".")[0] in LATE or name in LATE}
        assert module in LATE or not found, module
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", "--epp", "--epp-layout", "x"])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.arguments", None)  # an import would fail
        assert start.choose_allowed_layout() is None


@pytest.mark.parametrize(
    ("changes", "searches"),
    [
        ({}, True),
        ({"epp_layout": None}, False),
        ({"epp_search_ahead": False}, False),
        ({"save": None}, False),
    ],
)
def test_whether_a_job_searches_ahead(tmp_path: Path, monkeypatch, changes, searches) -> None:
    monkeypatch.setattr(job.dist, "get_rank", lambda: 0)
    given = {"save": str(tmp_path), "epp_search_ahead": True, "epp_memory_budget_gib": None}
    given |= {LAYOUT_KEY: {"devices": 4, "ep": 1}}
    look = job.Job._search_ahead(SimpleNamespace(args=SimpleNamespace(**given | changes)))
    assert (look is not None) is searches
    if look is not None:
        look.__self__.close()
