"""Every Python script starts: its imports and options are there."""

import pytest

from tests.mcore.runs import train
from tests.programs import ROOT, loaded

pytestmark = pytest.mark.everything

SCRIPTS = {path: path.read_text() for path in sorted((ROOT / "scripts").rglob("*.py"))}
WITH_OPTIONS = [path for path, text in SCRIPTS.items() if "ArgumentParser" in text]
WITHOUT = [path for path, text in SCRIPTS.items() if "ArgumentParser" not in text]


@pytest.mark.parametrize(
    "script", [path for path in WITH_OPTIONS if "__main__" in SCRIPTS[path]], ids=lambda p: p.name
)
def test_it_says_its_options(script) -> None:
    ended = train(["--help"], processes=0, program=(str(script),))
    assert ended.status == 0, ended.output
    assert "usage: " in ended.output or "cpu.py --case CASE" in ended.output


@pytest.mark.parametrize(
    "script", [path for path in WITHOUT if "__main__" in SCRIPTS[path]], ids=lambda path: path.name
)
def test_it_is_imported(script) -> None:
    assert loaded(script).__doc__
