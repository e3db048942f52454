"""Worlds of several ranks that a file of tests asks."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory) -> list[Mapping]:
    """What the RANKS of the program beside the test's module answer: one_stage.py for
    test_one_stage.py."""
    from tests.mcore.runs import train  # torch: only where it is asked for

    folder, module = tmp_path_factory.mktemp("answers"), Path(request.module.__file__)
    program = str(module.with_name(module.name.removeprefix("test_")))
    run = train([], processes=request.module.RANKS, program=(program, str(folder)))
    assert run.statuses == (0,) * request.module.RANKS, run.output
    return [json.loads(path.read_text()) for path in sorted(folder.glob("answers.*"))]


def require_said(pairs: Sequence[tuple[str, str]], count: int) -> None:
    """Each of ``count`` pairs is a pattern and the line of a ValueError that begins with it."""
    assert len(pairs) == count
    for pattern, said in pairs:
        assert re.match(f"ValueError: {pattern}", said), (pattern, said)
        assert "\n" not in said
