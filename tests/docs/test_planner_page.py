"""docs/how/planner.md explains every part of the line ``how`` of `plan`, and every lever."""

import re
from pathlib import Path

from megatron_epp.planner.chunks.params import UNCUT, ChunkingParams
from megatron_epp.planner.options import LEVERS
from megatron_epp.planner.order.policies import PolicyParams

PAGE = Path(__file__).parents[2] / "docs" / "how" / "planner.md"
CHUNKINGS = (
    ChunkingParams(17.9, cut=1.25, extra_bins=2, front=1, back=1, reverse=True),
    ChunkingParams(17.9, cut=UNCUT, extra_bins=-1, ramp=20, bare=True, local=1.0),
)
POLICIES = (
    PolicyParams(strict=True, lead=2, warm=1.5, deep=False),
    PolicyParams(strict=False, split=True),
    PolicyParams(strict=False, split=True, held=4.0, patience=0.6, lead=-1),
)


def without_numbers(text: str) -> str:
    text = re.sub(r"[0-9]+(\.[0-9]+)?%?(?![0-9A-Z])", "#", text)
    return text.replace("packs fewer", "packs more").replace("pack fewer", "packs more")


def unexplained(page: str) -> list[str]:
    """Return the parts of the line that no table of ``page`` has, and the levers without a row."""
    rows = re.findall(r"^\| (`.+?) \|", page, re.M)
    known = {without_numbers(word) for row in rows for word in re.findall(r"`([^`]+)`", row)}
    parts = [part for each in (*CHUNKINGS, *POLICIES) for part in str(each).split(", ")]
    return [part for part in (*parts, *LEVERS) if without_numbers(part) not in known]


def test_every_part_and_lever_has_a_row() -> None:
    assert unexplained(PAGE.read_text()) == []


def test_a_missing_row_is_found() -> None:
    page = PAGE.read_text()
    gone = "".join(row for row in page.splitlines(True) if "| `wsplit` |" not in row)
    assert unexplained(gone) == ["wsplit"]
    assert unexplained(page.replace("documents left whole", "documents whole")) == [
        "documents left whole"
    ]
