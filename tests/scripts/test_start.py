"""Every Python script starts: its imports and options are there."""

import pytest

from tests.mcore.runs import train
from tests.programs import ROOT

pytestmark = pytest.mark.everything

# Scripts without options, by what they print instead.
NO_OPTIONS = {"code_lines.py": "folder", "cpu.py": "cpu.py --case CASE"}
SCRIPTS = [
    path for path in sorted((ROOT / "scripts").rglob("*.py")) if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_starts(script) -> None:
    ended = train(["--help"], processes=0, program=(str(script),))
    assert ended.status == 0, ended.output
    assert NO_OPTIONS.get(script.name, "usage: ") in ended.output
