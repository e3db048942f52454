"""Flags of Megatron-LM's entry for ModelOpt, read as what they set there."""

import argparse

import pytest

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.patching.modelopt_flags import MEANT, add_arguments  # noqa: E402


@pytest.mark.parametrize("flag", MEANT)
def test_they_set_what_they_mean(parse, flag) -> None:
    plain, given = parse("--epp"), parse(flag, "--epp")
    meant, _ = MEANT[flag]
    changed = {name: value for name, value in vars(given).items() if getattr(plain, name) != value}
    own = flag.removeprefix("--").replace("-", "_")
    assert changed.pop(own) is True and getattr(plain, own) is False
    # Every destination is one that Megatron's parser knows.
    assert all(hasattr(plain, name) for name in meant)
    assert changed == {n: value for n, value in meant.items() if getattr(plain, n) != value}


def test_others_of_that_entry_stay_unknown(parse) -> None:
    with pytest.raises(ValueError, match="unrecognized arguments: --export-real-quant-cfg"):
        parse("--epp", "--export-real-quant-cfg", "None")


def test_a_megatron_that_knows_one_keeps_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-gpt-oss", action="store_true")
    add_arguments(parser)
    assert vars(parser.parse_args(["--enable-gpt-oss"]))["enable_gpt_oss"] is True
    assert not hasattr(parser.parse_args(["--enable-gpt-oss"]), "yarn_beta_fast")
