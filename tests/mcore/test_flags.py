"""Flags before Megatron is loaded, patterns and sizes that cannot be, flags of ModelOpt's entry."""

import argparse
import re

import pytest

from megatron_epp.cli.megatron_flags import require_known
from megatron_epp.cli.options import UsageError
from megatron_epp.mcore.patching.modelopt_flags import MEANT, add_arguments


def test_every_flag_of_megatrons_parser_is_known() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_epp.mcore.job.read_flags import prepare_parser

    parser = prepare_parser(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    names = (name for action in parser._actions for name in action.option_strings)
    flags = [name for name in names if name.startswith("--")]
    assert len(flags) > 500
    require_known("certify", [*flags, "--batches", "--pp=2", "--no-bias-gelu-fusion", "--"])
    with pytest.raises(
        UsageError, match=r"unknown option .--hiden-size.*did you mean --hidden-size"
    ):
        require_known("profile", [*flags, "--hiden-size=4"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--moe-layer-freq [0", "argument --moe-layer-freq: invalid moe_freq_type value: '[0'"),
        ("--moe-layer-freq x", "argument --moe-layer-freq: invalid moe_freq_type value: 'x'"),
        ("--window-attn-skip-freq ([1]", "argument --window-attn-skip-freq: invalid"),
        ("--no-rope-freq [1,", "argument --no-rope-freq: invalid"),
        ("--window-size x", "argument --window-size: invalid tuple_type value: 'x'"),
        ("--window-size 7", "give --window-size W,0 with W of at least 1 and below --seq-length"),
        ("--pipeline-model-parallel-layout Ett|tL", "3 layers; expected --num-layers, 4"),
        ("--lr 1e-3 --min-lr 1", "Megatron refuses the flags (--min-lr, --lr) at arguments.py:"),
    ],
)
def test_patterns_and_sizes_that_cannot_be_are_one_line(flags: str, says: str) -> None:
    from megatron_epp.certify.degrees import Degrees
    from megatron_epp.mcore.certify.model_flags import parsed, scaled

    words = f"--hidden-size 64 --num-attention-heads 4 --num-layers 4 {flags}".split()
    with pytest.raises(ValueError) as refusal:
        scaled(parsed(words, 2), Degrees(2, 1, 1), False)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--epp-memory-budget-gib 1 inf", "--epp-memory-budget-gib: 'inf': expected a number ab"),
        ("--epp-memory-budget-gib 1e7", "'1e7': expected a number from 1e-06 to 1e+06, in GiB"),
        ("--epp-memory-limit-gib 1e-300", "'1e-300': expected a number from 1e-06 to 1e+06, in"),
        ("--epp-memory-limit-gib nan", "--epp-memory-limit-gib: 'nan': expected a number above"),
        (f"--epp-effort 1{'0' * 5000}", "expected a whole number of at most 1000000"),
        ("--epp-effort=-1", "--epp-effort: '-1': expected a whole number of at least 0"),
        ("--epp-plan-cores 0", "--epp-plan-cores: '0': expected a whole number of at least 1"),
        ("--epp-row-multiple 2000", "'2000': expected a whole number of at most 1024"),
    ],
)
def test_what_the_planner_would_refuse_is_refused_at_start(parse, flags, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(*flags.split(), "--epp")


# ------------------------------------------------------------------ of ModelOpt's entry


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
