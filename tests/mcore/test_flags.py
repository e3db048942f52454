"""The light look at flags, before Megatron is loaded, refuses none that Megatron's parser has."""

import argparse

import pytest

from megatron_epp.cli.megatron_flags import require_known
from megatron_epp.cli.options import Refused
from megatron_epp.mcore.config import Config


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epp_memory_budget_gib": float("inf")}, "--epp-memory-budget-gib inf: expected from"),
        ({"epp_memory_budget_gib": 1e7}, r"--epp-memory-budget-gib 1e\+07: expected from 1e-06"),
        ({"epp_memory_limit_gib": 1e-300}, "--epp-memory-limit-gib 1e-300: expected from 1e-06"),
        ({"epp_memory_limit_gib": float("nan")}, "--epp-memory-limit-gib nan: expected from"),
        ({"epp_effort": 10**5000}, "--epp-effort: expected from 0 to 1000000"),
        ({"epp_effort": -1}, "--epp-effort: expected from 0"),
    ],
)
def test_what_the_planner_would_refuse_is_refused_at_start(values, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**values)
