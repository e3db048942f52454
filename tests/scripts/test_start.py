"""Every Python script starts: its imports and options are there."""

import re

import pytest

from tests.mcore.runs import train
from tests.programs import ROOT, loaded

pytestmark = pytest.mark.everything

SCRIPTS = {path: path.read_text() for path in sorted((ROOT / "scripts").rglob("*.py"))}
PROGRAMS = [path for path, text in SCRIPTS.items() if "__main__" in text]
WITH_OPTIONS = [path for path in PROGRAMS if re.search(r"parse_(known_)?args", SCRIPTS[path])]


@pytest.mark.parametrize("script", WITH_OPTIONS, ids=lambda path: path.name)
def test_it_says_its_options(script) -> None:
    ended = train(["--help"], processes=0, program=(str(script),))
    assert ended.status == 0, ended.output
    assert "usage: " in ended.output or "cpu.py --case CASE" in ended.output


@pytest.mark.parametrize(
    "script", sorted({*PROGRAMS} - {*WITH_OPTIONS}), ids=lambda path: path.name
)
def test_it_is_imported(script) -> None:
    assert loaded(script).__doc__
