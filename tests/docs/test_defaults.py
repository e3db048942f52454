"""Every flag and every lever has a row with its default in docs/reference/flags.md."""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import megatron_epp
from megatron_epp.certify.trial import DegreeFlags, Trial
from megatron_epp.cli.flags import FLAGS
from megatron_epp.flag_fields import flag_of
from megatron_epp.planner.options import LEVERS, TRAINING_LEVERS
from megatron_epp.planner.settings import SharedSettings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "flags.md"


def word(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def in_code() -> dict[str, set[str]]:
    """Defaults by flag, lever or keyword: those of all commands that have it."""
    from megatron_epp.mcore.calibrate.command import ProfileFlags
    from megatron_epp.mcore.flags.config import Config

    found: dict[str, set[str]] = defaultdict(set)
    of_commands = {schema for schemas in FLAGS.values() for schema in schemas}
    for schema in (*of_commands, Config, DegreeFlags, Trial, ProfileFlags):
        for each in fields(schema):
            short = each.metadata.get("short", "")
            if "help" not in each.metadata or each.metadata.get("positional"):
                continue
            name = short if short.startswith("--") else flag_of(each.name)
            found[name] |= set() if each.default is None else {word(each.default)}
    for name in LEVERS:
        found[name] = {word(name in TRAINING_LEVERS)}
    for function in (megatron_epp.install_schedule, megatron_epp.attach):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                found[name] |= set() if parameter.default is None else {word(parameter.default)}
    return found


def in_page(text: str) -> Iterator[tuple[str, set[str], str]]:
    """Name, defaults and reason of every row."""
    for line in text.split("## Defaults, and why")[1].splitlines():
        if line.startswith("| `"):
            names, defaults, why = (cell.strip() for cell in line.strip("| ").split(" | "))
            for name in re.findall(r"`([^`]+)`", names):
                yield name, set(re.findall(r"`([^`]+)`", defaults)), why


def test_every_default_has_a_row_with_its_reason() -> None:
    rows = list(in_page(PAGE.read_text()))
    assert {name: defaults for name, defaults, _ in rows} == in_code()
    assert len({name for name, *_ in rows}) == len(rows)
    assert all(len(why) > 3 for *_, why in rows)


def test_training_and_plan_say_the_same_of_what_they_share() -> None:
    """Each may then go on with what only it does."""
    from megatron_epp.mcore.flags.config import Config

    planning = {each.name: each for schema in FLAGS["plan"] for each in fields(schema)}
    training = {each.name: each for each in fields(Config)}
    for setting in fields(SharedSettings):
        for each in (planning[setting.name], training[f"epp_{setting.name}"]):
            assert each.metadata["help"].startswith(setting.metadata["help"])


def test_a_row_that_is_missing_or_wrong_is_found() -> None:
    text = PAGE.read_text()
    gone = "".join(line for line in text.splitlines(True) if not line.startswith("| `headroom`"))
    other = text.replace("| `--epp-overlong` | `truncate` |", "| `--epp-overlong` | `drop` |")
    for wrong in (gone, other):
        assert {name: defaults for name, defaults, _ in in_page(wrong)} != in_code()
