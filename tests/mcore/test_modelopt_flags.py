"""Flags of Megatron-LM's entry for ModelOpt, read as what they set there."""

import argparse
import sys

import pytest

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.patching.modelopt_flags import MEANT, add_arguments  # noqa: E402


@pytest.fixture
def parsed(monkeypatch):
    """What Megatron's parser and ours make of words."""
    from megatron.training.arguments import parse_args

    from megatron_epp.mcore.job.read_flags import prepare_parser

    def parse(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["pretrain", *words])
        return parse_args(prepare_parser)

    return parse


@pytest.mark.parametrize("flag", MEANT)
def test_they_set_what_they_mean(parsed, flag) -> None:
    plain, given = parsed("--epp"), parsed(flag, "--epp")
    meant, _ = MEANT[flag]
    changed = {name: value for name, value in vars(given).items() if getattr(plain, name) != value}
    own = flag.removeprefix("--").replace("-", "_")
    assert changed.pop(own) is True and getattr(plain, own) is False
    # Every destination is one that Megatron's parser knows.
    assert all(hasattr(plain, name) for name in meant)
    assert changed == {n: value for n, value in meant.items() if getattr(plain, n) != value}


def test_others_of_that_entry_stay_unknown(parsed) -> None:
    with pytest.raises(ValueError, match="unrecognized arguments: --export-real-quant-cfg"):
        parsed("--epp", "--export-real-quant-cfg", "None")


def test_a_megatron_that_knows_one_keeps_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-gpt-oss", action="store_true")
    add_arguments(parser)
    assert vars(parser.parse_args(["--enable-gpt-oss"]))["enable_gpt_oss"] is True
    assert not hasattr(parser.parse_args(["--enable-gpt-oss"]), "yarn_beta_fast")
