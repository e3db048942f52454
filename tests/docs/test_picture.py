"""Pictures of the pages are what their scripts draw, and show what the pages say of them."""

import re

from megatron_epp.mcore.patching.releases import STABLE
from tests.programs import ROOT, loaded


def load(name: str = "draw_plans"):
    return loaded(ROOT / "docs" / f"{name}.py")


def test_the_picture_is_what_the_script_draws() -> None:
    script = load()
    kept = script.FILE.read_text()
    assert script.picture() == kept, "run python docs/draw_plans.py and look at the picture"
    assert "docs/plan_against_packing.svg" in (ROOT / "README.md").read_text()


def test_pictures_of_how_it_works_are_what_the_script_draws() -> None:
    pages = " ".join(page.read_text() for page in (ROOT / "docs" / "how").glob("*.md"))
    for path, drawn in load("draw_how").pictures().items():
        assert path.read_text() == drawn, "run python docs/draw_how.py and look at the pictures"
        assert f"(../{path.name})" in pages


def test_the_house_is_drawn_from_its_imports() -> None:
    script = load("draw_architecture")
    kept = script.FILE.read_text()
    assert script.picture() == kept, "run python docs/draw_architecture.py and look at the picture"
    page = (ROOT / "docs" / "how" / "architecture.md").read_text()
    rooms = [path.parent.name for path in script.PACKAGE.glob("*/__init__.py")]
    assert (
        "architecture.svg" in page
        and [room for room in rooms if f"\n- `{room}/`" not in page] == []
    )


def test_pages_count_the_patch_points() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    counts = re.findall(r"\b(\d+) of (\d+)\b", page.split("## Flags")[0])
    assert len(counts) >= 3
    assert {int(count) for pair in counts for count in pair} == {len(STABLE.fingerprints)}


def test_the_plan_is_faster_in_the_same_memory() -> None:
    packing, epp, _ = load().plans()
    assert packing.seconds / epp.seconds > 1.25
    assert all(a <= b for a, b in zip(epp.peak_bytes, packing.peak_bytes, strict=True))
