"""Rows that commands pad chunks to where --multiple does not say: as training on that device."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import model
from megatron_epp.ir import Plan
from tests.cli.commands import said

LENGTHS = (9001, 1503, 900, 301, 12, 4000, 2500, 77)  # 18294 tokens
LLAMA = ("--model", "llama3-8b", "--device", "h100-80g", "--effort", 0, "--vocab-parallel", "off")


def multiple(capsys: Any, lengths: str, *words: object) -> int:
    return json.loads(said(capsys, "plan", "--lengths", lengths, *words, "--json"))["multiple"]


def test_a_plan_for_a_gpu_is_padded_as_training_pads(capsys: Any, lengths: str) -> None:
    """18294 tokens: 1% of them are 183 rows, half a multiple of 16 for 4 chunks on each of two
    stages are 64 on one rank and 256 on four, which are too many."""
    llama = (lengths, *LLAMA, "--pp", 2)
    assert multiple(capsys, *llama) == 16
    assert multiple(capsys, *llama, "--tp", 2) == 16 * 2
    assert multiple(capsys, *llama, "--tp", 2, "--cp", 2) == 4 * 4
    assert multiple(capsys, *llama, "--cp", 2, "--dp", 2) == 4 * 2  # half the tokens a replica
    assert multiple(capsys, *llama, "--multiple", 1) == 1
    assert multiple(capsys, *llama, "--multiple", 24, "--tp", 2) == 24


def test_costs_measured_on_a_cpu_pad_nothing(capsys: Any, lengths: str, tmp_path: Path) -> None:
    assert multiple(capsys, lengths, "--model", "gpt-7b", "--device", "cpu", "--pp", 1) == 1
    measured = profile(model("llama3-8b"), device("h100-80g"))
    for name, of_rank in (("cpu: a processor", 1), ("NVIDIA H100 80GB HBM3", 16)):
        path = tmp_path / "costs.json"
        replace(measured, provenance=replace(measured.provenance, device=name)).save(str(path))
        words = ("--cost-model", path, "--pp", 2, "--layers", 16, 16, "--memory-budget-gib", 99)
        assert multiple(capsys, lengths, *words, "--effort", 0) == of_rank


def test_what_is_padded_is_played_and_printed(capsys: Any, lengths: str, tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    shown = said(capsys, "plan", "--lengths", lengths, *LLAMA, "--pp", 2, "--tp", 4, "-o", path)
    assert "\npadding     chunks to multiples of 16 tokens\n" in shown
    plan = Plan.parse(path.read_text())
    assert any(chunk.tokens % 16 for chunk in plan.chunks)
    assert plan.predicted is not None

    def played(*words: object) -> float:
        return json.loads(said(capsys, "simulate", path, *words, "--json"))["seconds"]

    # By the plan's own comment; and, where there is none, by its documents.
    assert played() == pytest.approx(plan.predicted.seconds, rel=1e-9)
    assert played("--multiple", 1) < plan.predicted.seconds < played("--multiple", 512)
    path.write_text(str(plan))
    named = (*LLAMA[:4], "--tp", 4)
    assert played(*named) == pytest.approx(plan.predicted.seconds, rel=1e-9)


def test_compare_and_tune_say_what_is_padded(capsys: Any, lengths: str) -> None:
    words = ("compare", "--lengths", lengths, *LLAMA, "--pp", 2, "--planner", "packing")
    assert "\npadding  chunks to multiples of 16 tokens\n" in said(capsys, *words)
    assert "\npadding" not in said(capsys, *words, "--multiple", 1)
    tuned = ("tune", "--lengths", lengths, *LLAMA, "--nodes", 1, "--global-batch-size", 8)
    text = re.sub(r"\n *", " ", said(capsys, *tuned, "--batches", 1, "--tp", 4))
    assert "1 batches; rows of a device padded to multiples of 4 " in text
    choices = json.loads(said(capsys, *tuned, "--batches", 1, "--json"))["choices"]
    assert {choice["tp"] for choice in choices} > {4}
    assert all(choice["multiple"] == 4 * choice["tp"] * choice["cp"] for choice in choices)
