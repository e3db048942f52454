"""A folder to work in, with files of lengths and a plan, and the commands."""

from pathlib import Path

import pytest

from tests.cli.commands import LENGTHS, LONG_AND_SHORT, PLAN, Commands


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: file names of command lines are relative to it."""
    monkeypatch.chdir(tmp_path)
    for name, lengths in (
        ("lengths", LENGTHS), ("spread", LONG_AND_SHORT), ("pair", (3000, 900)),
    ):  # fmt: skip
        Path(name).write_text("\n".join(map(str, lengths)))
    Path("a.plan").write_text(PLAN)
    return tmp_path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)
