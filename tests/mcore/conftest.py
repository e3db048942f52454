"""The corpus that tests of training runs read."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of the LENGTHS of the test's module."""
    from tests.mcore.runs import write_corpus  # torch: only where it is asked for

    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", request.module.LENGTHS)
