"""Plans of 41 batches come out byte for byte: ``scripts/golden_plans.py --write`` rewrites them."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden_plans.py"
spec = importlib.util.spec_from_file_location("golden_plans", SCRIPT)
assert spec is not None and spec.loader is not None
golden_plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(golden_plans)
CASES = list(golden_plans.cases())


@pytest.mark.parametrize(("path", "arguments"), CASES, ids=[path.stem for path, _ in CASES])
def test_the_plan_is_the_golden_one(path: Path, arguments: list[str]) -> None:
    assert golden_plans.make(arguments) == path.read_text()


def test_no_golden_plan_is_left_behind() -> None:
    assert sorted(golden_plans.FOLDER.iterdir()) == sorted(path for path, _ in CASES)
