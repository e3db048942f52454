"""What commands say of the analytic model, and the flag for how tokens go to experts."""

import dataclasses
import json

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.accuracy import accuracy_lines
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from tests.cli.commands import LENGTHS, printed

DENSE = ["--model", "llama3-8b", "--device", "h100-80g", "--cp", 4]
EXPERTS = ["--model", "qwen3-30b-a3b", "--device", "h100-80g", "--tp", 2, "--cp", 4]
ANALYTIC = profile(MODELS["llama3-8b"], DEVICES["h100-80g"])
LINE = accuracy_lines(ANALYTIC)


def test_only_a_device_that_is_scored_has_figures() -> None:
    assert LINE[0].startswith("analytic model of h100-80g: median ")
    assert " public measurements of dense models; " in LINE[0] and " of MoE; " in LINE[0]
    unscored = profile(MODELS["llama3-8b"], DEVICES["a100-80g"])
    line = "analytic model of a100-80g: no public measurement scores it"
    assert accuracy_lines(unscored) == [line]
    origin = dataclasses.replace(ANALYTIC.provenance, kind="measured")
    assert accuracy_lines(dataclasses.replace(ANALYTIC, provenance=origin)) == []


@pytest.fixture
def batch(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("\n".join(map(str, LENGTHS)))
    return ["--lengths", path, "--pp", 2]


def test_plan_and_compare_end_with_how_far_the_model_is_off(capsys, batch) -> None:
    planned = printed(capsys, "plan", *batch, *DENSE)
    assert planned.err.splitlines()[-1:] == LINE
    compared = printed(capsys, "compare", *batch, *DENSE, "--planner", "packing", "1f1b").out
    assert " ".join(compared.split()).endswith(LINE[0])  # which is wrapped


def test_tune_ends_with_it_too(capsys, batch) -> None:
    layout = ("--nodes", 1, "--pp", 2, "--tp", 1, "--cp", 4)
    tuned = printed(capsys, "tune", *batch[:2], *DENSE[:4], *layout)
    assert " ".join(tuned.out.split()).endswith(LINE[0])


def test_json_is_json_alone(capsys, batch) -> None:
    shown = printed(capsys, "compare", *batch, *DENSE, "--planner", "packing", "--json")
    json.loads(shown.out)
    assert "analytic model of" not in shown.out


def test_how_tokens_go_to_experts_is_a_flag(capsys, batch) -> None:
    def seconds(*words: str) -> float:
        shown = printed(capsys, "plan", *batch, *EXPERTS, "--ep", 8, "--json", *words)
        return json.loads(shown.out)["seconds"]

    sorted_apart = seconds("--moe-token-dispatcher-type", "alltoall")
    assert seconds() == sorted_apart
    assert seconds("--moe-token-dispatcher-type", "flex") < sorted_apart
