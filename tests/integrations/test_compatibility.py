"""Import paths that users have written down resolve to the folders of frameworks."""

from importlib import import_module

import pytest

NAMES = ("areal", "bridge", "nemo_rl", "roll", "skyrl", "slime", "swift", "verl")


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_of_integrations_is_that_of_frameworks(name: str) -> None:
    before = import_module(f"megatron_epp.integrations.{name}")
    assert before is import_module(f"megatron_epp.frameworks.{name}.shapes")
    assert hasattr(before, f"{name}_reader")


@pytest.mark.parametrize(
    "path, where, what",
    [
        ("slime_samples", "slime", "before_train_step before_log_probs SlimeSamples"),
        ("verl_samples", "verl", "register_engine VerlSamples"),
        ("nemo_samples", "nemo_rl", "NemoSamples"),
        ("swift_packs", "swift", "SwiftPacks"),
    ],
)
def test_an_adapter_of_loops_is_that_of_frameworks(path: str, where: str, what: str) -> None:
    before = import_module(f"megatron_epp.mcore.loops.adapters.{path}")
    now = import_module(f"megatron_epp.frameworks.{where}.slices")
    assert all(getattr(before, name) is getattr(now, name) for name in what.split())
