"""Rows that commands pad chunks to where --multiple does not say: as training on that device."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import device
from megatron_epp.cost.catalogue.models import model
from megatron_epp.ir import Plan
from tests.cli.commands import Commands

# 18294 tokens.
ODD = (9001, 1503, 900, 301, 12, 4000, 2500, 77)
LLAMA = (
    "--lengths odd --model llama3-8b --device h100-80g --effort 0 --vocab-parallel off "
    "--placement even"
)
MEASURED = "--lengths odd --effort 0 --layers 16 16 --memory-budget-gib 99 --cost-model"


@pytest.fixture(autouse=True)
def odd_lengths(folder: Path) -> None:
    Path("odd").write_text("\n".join(map(str, ODD)))


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        # 1% of the tokens are 183 rows, half a multiple of 16 for 4 chunks on each of two stages
        # are 64 on one rank and 256 on four, which are too many.
        (LLAMA, 16),
        (f"{LLAMA} --tp 2", 16 * 2),
        (f"{LLAMA} --tp 2 --cp 2", 4 * 4),
        (f"{LLAMA} --cp 2 --dp 2", 4 * 2),  # half the tokens a replica
        (f"{LLAMA} --multiple 1", 1),
        (f"{LLAMA} --multiple 24 --tp 2", 24),
        # Costs measured on a CPU pad nothing.
        (f"{LLAMA} --model gpt-7b --device cpu --pp 1", 1),
        (f"{MEASURED} cpu.json", 1),
        (f"{MEASURED} gpu.json", 16),
    ],
)
def test_a_plan_is_padded_as_training_pads(cli: Commands, words: str, multiple: int) -> None:
    measured = profile(model("llama3-8b"), device("h100-80g"))
    for file, name in (("cpu", "cpu: a processor"), ("gpu", "NVIDIA H100 80GB HBM3")):
        provenance = replace(measured.provenance, device=name)
        replace(measured, provenance=provenance).save(f"{file}.json")
    assert cli.facts(f"plan --pp 2 {words}")["multiple"] == multiple


def test_what_is_padded_is_played_and_printed(cli: Commands) -> None:
    shown = cli.said(f"plan {LLAMA} --pp 2 --tp 4 -o x.plan")
    assert "\npadding     chunks to multiples of 16 tokens\n" in shown
    plan = Plan.parse(Path("x.plan").read_text())
    assert any(chunk.tokens % 16 for chunk in plan.chunks)
    assert plan.predicted is not None

    def played(words: str = "") -> float:
        return cli.facts(f"simulate x.plan {words}")["seconds"]

    # By the plan's own comment; and, where there is none, by its documents.
    assert played() == pytest.approx(plan.predicted.seconds, rel=1e-9)
    assert played("--multiple 1") < plan.predicted.seconds < played("--multiple 512")
    Path("x.plan").write_text(str(plan))
    named = "--model llama3-8b --device h100-80g --tp 4"
    assert played(named) == pytest.approx(plan.predicted.seconds, rel=1e-9)


@pytest.mark.everything
def test_compare_and_tune_say_what_is_padded(cli: Commands) -> None:
    line = f"compare {LLAMA} --pp 2 --planner packing"
    assert "\npadding  chunks to multiples of 16 tokens\n" in cli.said(line)
    assert "\npadding" not in cli.said(f"{line} --multiple 1")
    tuned = f"tune {LLAMA} --nodes 1 --global-batch-size 8 --batches 1"
    told = cli.joined(f"{tuned} --tp 4")
    assert "1 batches; rows of a device padded to multiples of 4 " in told
    choices = cli.facts(tuned)["choices"]
    assert {choice["tp"] for choice in choices} > {4}
    assert all(choice["multiple"] == 4 * choice["tp"] * choice["cp"] for choice in choices)
