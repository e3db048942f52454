"""What the cost model promises a chunk holds is what running it holds, for both kinds of store."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ledger.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("attention", ["parts", "varlen"])
def test_a_stage_holds_what_was_promised(attention: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mcore.ledger", attention],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    (slices, recomputed, beside, hybrid, *offloaded) = (
        tuple(map(float, line.split())) for line in done.stdout.splitlines()[-8:]
    )
    for promised, measured, *on_host in (slices, beside, hybrid):
        assert promised == pytest.approx(measured, rel=0.001)
        assert on_host == [0, 0]
    for promised, measured, there, found in offloaded:
        assert promised == pytest.approx(measured, rel=0.05)
        assert there == pytest.approx(found, rel=0.05) and there > 0
    # The layer that lives again is charged as if its slice's K and V were made again, too.
    assert recomputed[1] <= recomputed[0] <= 1.05 * recomputed[1]
