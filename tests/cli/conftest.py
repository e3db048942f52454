"""The file of lengths that tests of the command line plan for."""

from pathlib import Path

import pytest


@pytest.fixture
def lengths(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file with the LENGTHS of the test's module."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, request.module.LENGTHS)))
    return str(path)
