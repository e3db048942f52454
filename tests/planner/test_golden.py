"""Plans of 49 batches come out byte for byte: ``golden_plans.py --write`` rewrites them."""

from pathlib import Path

import pytest

from tests.planner import golden_plans

CASES = list(golden_plans.cases())
QUICK = {"--planner", "--forward-only", "none"}  # first tier: published schedules, no search


@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        pytest.param(
            *case, id=case[0].stem, marks=[pytest.mark.everything] * QUICK.isdisjoint(case[1])
        )
        for case in CASES
    ],
)
def test_the_plan_is_the_golden_one(path: Path, arguments: list[str]) -> None:
    assert golden_plans.make(arguments) == path.read_text()


def test_no_golden_plan_is_left_behind() -> None:
    assert sorted(golden_plans.FOLDER.iterdir()) == sorted(path for path, _ in CASES)
