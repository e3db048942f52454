"""The README's picture is what its script draws, and shows what the README says of it."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def load():
    spec = importlib.util.spec_from_file_location("draw_plans", ROOT / "docs" / "draw_plans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_script_draws() -> None:
    script = load()
    kept = script.FILE.read_text()
    assert script.picture() == kept, "run python docs/draw_plans.py and look at the picture"
    assert "docs/plan_against_packing.svg" in (ROOT / "README.md").read_text()


def test_the_plan_is_faster_in_the_same_memory() -> None:
    packing, epp, _ = load().plans()
    assert packing.seconds / epp.seconds > 1.25
    assert all(a <= b for a, b in zip(epp.peak_bytes, packing.peak_bytes, strict=True))
