"""The good input of all attacks."""

import pytest

from tests.attack.material import Material


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("material"))
