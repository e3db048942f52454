"""The light look at flags, before Megatron is loaded, refuses none that Megatron's parser has."""

import argparse

import pytest

from megatron_epp.cli.megatron_flags import require_known
from megatron_epp.cli.options import Refused


def test_every_flag_of_megatrons_parser_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training.arguments import parse_args

    from megatron_epp.mcore.flags import prepare_parser

    def caught(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        flags.extend(
            name for action in parser._actions for name in action.option_strings if name[:2] == "--"
        )
        raise InterruptedError

    flags: list[str] = []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", caught)
    with pytest.raises(InterruptedError):
        parse_args(prepare_parser)
    assert len(flags) > 500
    require_known("certify", [*flags, "--batches", "--pp=2", "--no-bias-gelu-fusion", "--"])
    with pytest.raises(Refused, match=r"unknown option .--hiden-size.*did you mean --hidden-size"):
        require_known("profile", [*flags, "--hiden-size=4"])
