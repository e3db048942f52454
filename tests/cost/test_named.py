"""Names, near names and files of models, devices and profiles."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES, device
from megatron_epp.cost.catalogue.models import MODELS, model
from megatron_epp.cost.profile import Profile, Seconds
from tests.refusals import refusal

PROFILE = profile(MODELS["llama3-8b"], DEVICES["h100-80g"])


def test_the_promised_names() -> None:
    dense = {"gpt-7b", "gpt-13b", "gpt-30b", "llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b"}
    experts = {"qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b"}
    states = {"nemotron-h-8b", "nemotron-3-nano", "nemotron-3-super", "qwen3-next-80b"}
    assert set(MODELS) == {*dense, *experts, *states, "gemma3-27b"}
    gpus = "a100-40g a100-80g h100-80g h200-141g h800-80g h20-96g b200-180g gb200-186g l40s-48g"
    assert set(DEVICES) == {*gpus.split(), "cpu"}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: model("gpt-14b"), "unknown model 'gpt-14b'; did you mean gpt-13b"),
        (lambda: model("xyz"), "unknown model 'xyz'; known: gpt-7b, gpt-13b, gpt-30b"),
        (lambda: device("h100"), "unknown device 'h100'; did you mean h100-80g or"),
        (lambda: model("no/such.json"), "model file no/such.json: No such file; give a name"),
        (
            lambda: named_cost("gpt-13b", "a100-80g", pp=41),
            "pp 41: expected 1 to 40, the layers of the model",
        ),
        (
            lambda: named_cost("gpt-13b", "a100-80g", pp=2, layers=(20, 21)),
            "layers 20 21: expected 2 numbers that add up to 40",
        ),
        (
            lambda: named_cost("gpt-13b", "a100-80g", pp=4, cp=8, zero=3, memory_budget_gib=8),
            "memory budget 8 GiB: stage 0 needs more than 8.841 GiB for its model states alone; "
            "raise the budget, or use more stages or devices",
        ),
        (lambda: named_cost("gpt-13b", "a100-80g", pp=4, zero=2), "zero 2: expected 1 or 3"),
        (lambda: named_cost("gpt-13b", "a100-80g", pp=4, cp=0), "cp 0: expected at least 1"),
    ],
)
def test_one_clear_line(call, error: str) -> None:
    assert refusal(ValueError, call).startswith(error)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"name": NaN}', '{"name": "x"}', "\udcff"])
def test_a_file_that_is_no_model(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refusal(ValueError, model, str(file)).startswith(f"model file {file}: ")


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    shape = dataclasses.asdict(DEVICES["h100-80g"]) | {"name": "mine", "budget_gib": 50}
    file.write_text(json.dumps(shape))
    assert device(str(file)).group_bytes_per_second == DEVICES["h100-80g"].group_bytes_per_second


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("on", DEVICES)
def test_profiles_go_to_text_and_back(name: str, on: str, tmp_path: Path) -> None:
    made = profile(MODELS[name], DEVICES[on])
    assert Profile.from_json(made.to_json()) == made
    made.save(str(tmp_path / "p.json"))
    assert Profile.load(str(tmp_path / "p.json")) == made
    assert without_states(made) != made


@pytest.mark.parametrize("bad", ["1e999", "NaN", "-1", '"1"', "true", "null", "[]", "{}"])
def test_numbers_that_are_none(bad: str) -> None:
    text = PROFILE.to_json()
    figure = json.dumps(PROFILE.layer_parameters)
    assert f'"layer_parameters": {figure}' in text
    with pytest.raises(ValueError, match=r"layer_parameters: .*expected a number of at least 0"):
        Profile.from_json(
            text.replace(f'"layer_parameters": {figure}', f'"layer_parameters": {bad}')
        )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"budget_gib": True}, "budget_gib True: expected a number"),
        ({"budget_gib": 1e308}, "budget_gib 1e+308: expected from 0.001 to 1e+06"),
        ({"node_devices": 0}, "node_devices 0: expected a number above 0"),
        ({"node_devices": 1.5}, "node_devices 1.5: expected a whole number"),
        ({"linear_flops": 1e-300}, "linear_flops 1e-300: expected from 1 to 1e+24"),
        ({"link_latency_seconds": 1e300}, "link_latency_seconds 1e+300: expected from 0 to 1000"),
        ({"group_bytes_per_second": {"0": 1e9}}, "group_bytes_per_second of a group of '0': "),
        ({"group_bytes_per_second": {"-4": 1e9}}, "group_bytes_per_second of a group of '-4': "),
        ({"group_bytes_per_second": {"8": True}}, "group_bytes_per_second of a group of '8' True"),
        ({"memory_efficiency": 1.5}, "memory_efficiency 1.5: expected from 0 to 1"),
        ({"host_forward_seconds": -1}, "host_forward_seconds -1: expected from 0 to 1000"),
        ({"host_backward_seconds": "1"}, "host_backward_seconds '1': expected a number"),
        ({"gather_latency_seconds": {"2": -1}}, "gather_latency_seconds of a group of '2' -1: "),
        ({"group_bytes_per_second": {}}, "group_bytes_per_second: expected a rate for one size"),
    ],
)
def test_a_device_that_makes_no_sense_is_refused(tmp_path: Path, change: dict, error: str) -> None:
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(dataclasses.asdict(DEVICES["h100-80g"]) | change))
    with pytest.raises(ValueError) as caught:
        device(str(file))
    assert str(caught.value).startswith(f"device file {file}: {error}")


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        (Seconds(), "layer_seconds: F: a token takes no time; expected per_token or per_pair"),
        (Seconds(1e9), "layer_seconds: .*expected at most 1000"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(seconds: Seconds, error: str) -> None:
    layer = dict.fromkeys(PROFILE.layer_seconds, seconds)
    text = dataclasses.replace(PROFILE, layer_seconds=layer).to_json()
    with pytest.raises(ValueError, match=f"^profile file p.json: {error}"):
        Profile.from_json(text, "p.json")


def test_a_file_without_end_is_refused() -> None:
    for read in (model, device, Profile.load):
        with pytest.raises(ValueError, match=r"/dev/zero: longer than 16 MiB; expected a descr"):
            read("/dev/zero")
