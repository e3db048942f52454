"""The generated reference pages are what the code says today."""

import argparse
import re
from dataclasses import dataclass, fields

import pytest

from megatron_epp.cli.flags import FLAGS
from megatron_epp.flag_fields import add_flags, flag
from megatron_epp.planner.settings import SharedSettings
from tests.programs import ROOT, loaded

write_reference = loaded(ROOT / "docs" / "write_reference.py")


@pytest.mark.parametrize("name", sorted(write_reference.PAGES))
def test_the_page_is_what_the_script_writes(name: str) -> None:
    written = (write_reference.FOLDER / name).read_text()
    assert write_reference.PAGES[name]() == written, "run python docs/write_reference.py"


def test_a_flag_that_changes_is_found() -> None:
    @dataclass
    class Flags:
        TITLE = "flags"
        epp_new: int = flag(3, "50%% of --epp-plan, a|b", ("N", int))

    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, Flags)
    assert list(write_reference.flag_rows(parser._actions)) == [
        ['<a id="epp-new"></a>`--epp-new N`', "50% of `--epp-plan`, a|b. Default: `3`."]
    ]


def test_options_of_several_commands_stand_once() -> None:
    page = write_reference.commands_page()
    rows = re.findall(r"^- (`-.*?`): (.*)", page, re.M)
    assert len(rows) == len(set(rows)) > 80
    after = page.split("*plan, compare, tune*:\n\n")[1].split("\n\n")[0]
    assert "- `--global-batch-size N`: Documents per batch" in after
    common = "Memory of a device in GiB, which includes the states of the model."
    shared = f"{common} Default: all of it."
    expected = "As [shared](#shared-options). Default: none."
    assert write_reference.as_shared(f"{common} Default: none.", shared) == expected
    assert write_reference.as_shared(common, shared) == "As [shared](#shared-options)."
    for meaning in (shared, "Memory of a device.", f"{common[:-1]}, too. Default: none."):
        assert write_reference.as_shared(meaning, shared) == meaning
    placement = "- `--placement PLACEMENT ...`: As [`--epp-placement`](flags.md#epp-placement) in "
    assert placement in page


@pytest.mark.parametrize(
    "what, flags, feature",
    [
        ("static recompute (--a-b, --c)", ["--a-b", "--c"], "static recompute"),
        ("FSDP (--use, -more): why", ["--use"], "FSDP: why"),
        ("dropout (--drop above 0)", ["--drop"], "dropout (above 0)"),
        ("MTP with MoE (--a of --b)", ["--a", "--b"], "MTP with MoE (--a of --b)"),
        ("--fp16", ["--fp16"], ""),
    ],
)
def test_flags_of_a_refused_feature(what: str, flags: list[str], feature: str) -> None:
    assert write_reference.flags_and_feature(what) == (flags, feature)


def test_a_flag_without_a_group_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {k: v.replace("epp_effort ", "") for k, v in write_reference.GROUPS.items()}
    monkeypatch.setattr(write_reference, "GROUPS", left)
    with pytest.raises(ValueError, match=r"epp_effort.*expected every flag of Config in one group"):
        write_reference.flags_page()


def test_the_matrix_says_what_the_table_refuses() -> None:
    """Of one feature of each answer, as tests/mcore/test_refusals.py has them refused."""
    answers = {
        "--hidden-dropout 0": ["yes", "yes", "yes"],
        "--num-experts 4 --moe-expert-capacity-factor 1.0": ["no", "no", "no"],
        "--mtp-num-layers 1": ["yes", "no", "yes"],
        "--cuda-graph-impl local": ["no effect", "no", "no effect"],
        "--async-save": ["yes", "yes", "no"],
    }
    assert {words: [*write_reference.answers(words, True)] for words in answers} == answers
    assert [*write_reference.answers("--async-save", False)] == ["yes", "", "no"]


def test_training_and_plan_say_the_same_of_what_they_share() -> None:
    """Each may then go on with what only it does."""
    from megatron_epp.mcore.flags.config import Config

    planning = {each.name: each for schema in FLAGS["plan"] for each in fields(schema)}
    training = {each.name: each for each in fields(Config)}
    for setting in fields(SharedSettings):
        for each in (planning[setting.name], training[f"epp_{setting.name}"]):
            assert each.metadata["help"].startswith(setting.metadata["help"])
