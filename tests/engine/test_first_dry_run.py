"""The steps by worth of a GPU day (gpu_day.sh --first), small and with emulated kernels.

Each of the trainings runs as four ranks over gloo, with several stages on each.
"""

import os
import re
import subprocess

import pytest

from tests.engine.test_dry_run import ALIKE, DAY, ROOT, steps
from tests.forked_python import forked_python

pytestmark = pytest.mark.gpu

LEFT_OUT = "replay-split"
RESULTS = "scripts/bench/results/gpu-day-dry-run.md"
SHOWN = {
    "masks": r"a slice of 32 tokens after 64: B beside bottom right: two calls [0-9.]+, torch",
    "replay-whole": r"epp  +\d",
    "trains-4-1": r"epp iteration 2: (.|\n)*iteration +2/ +2 .* lm loss: [0-9.E+]+ ",
    "trains-2-2": r"epp iteration 2: (.|\n)*iteration +2/ +2 .* lm loss: [0-9.E+]+ ",
    "op-host": r"(?m)^ *W   minima( +-?[0-9.]+){3} +[0-9.]+%$",
    "experts": r" 8 +96  stacked +\d.*e-0\d",
    "certify-first": r"(certified: 2 batches(.|\n)*){3}",
}


def test_the_steps_by_worth_end_well(tmp_path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "day"
    results.mkdir()
    (results / f"{LEFT_OUT}.state").write_text("ok|0\n")
    words = ["--results", str(results), "--page", str(page)]
    with forked_python() as python:
        environment = {**os.environ, "python": str(python)}
        for step in (["corpus"], ["--first", "--minutes", "60"], ["--first", "--minutes", "60"]):
            # The last time as a day that goes on: a neighbour may have taken a port.
            done = subprocess.run(
                [*DAY, *words, *step], env=environment, capture_output=True, text=True
            )
    text = page.read_text()
    assert done.returncode == 0, done.stdout + text
    found = steps(text)
    assert {result for _, result in found.values()} == {"ok"}
    assert steps((ROOT / RESULTS).read_text()) == found, (
        f"bash scripts/gpu/gpu_day.sh --first --dry-run --page {RESULTS} writes it again"
    )
    assert set(found) >= {LEFT_OUT, *SHOWN} and set(found) <= set(ALIKE)
    for name, says in SHOWN.items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert re.search(says, section), section
