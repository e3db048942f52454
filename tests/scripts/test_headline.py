"""The head of a benchmark's result says when, of which commit, by which command, on what."""

import re
import sys
from pathlib import Path

from tests.programs import loaded

HEADLINE = Path(__file__).parents[2] / "scripts" / "bench" / "headline.py"


def test_it_holds_what_repeats_the_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["/elsewhere/some.py", "--cases", "4096x8", "-o", "a b.md"])
    module = loaded(HEADLINE)  # when a script imports it, it looks at the command
    sys.argv[:] = ["some.py", "--num-layers", "8"]  # as before Megatron reads its flags
    path = tmp_path / "new" / "result.md"
    for table in ("| 1 |\n", "| 2 |\n"):
        module.write(str(path), module.heading(f"{module.host()}, fp32") + table)
    result = (
        r"## \d{4}-\d\d-\d\d, commit [0-9a-z-]+\n\n"
        r"`scripts/bench/some\.py --cases 4096x8 -o 'a b\.md'`\n\n"
        r".+, \d+ cores, Python 3\.[0-9.]+, fp32\.\n\n"
    )
    assert re.fullmatch(rf"{result}\| 1 \|\n{result}\| 2 \|\n", path.read_text())
