"""Shares of compute time beside messages: intervals by hand, a plan by hand, and all planners'."""

import pytest

from megatron_epp.ir import Plan
from megatron_epp.sim.play import play
from megatron_epp.sim.resident import extra_ratio, resident_ratios
from megatron_epp.sim.unit_table import unit_table

TWO = Plan.parse("""\
plan v1
documents 4 4
layers 1 1
chunk 0: 0[0:4]
chunk 1: 1[0:4]
stage 0: F0 F1 B0 B1
stage 1: F0 B0 F1 B1
""")


@pytest.mark.parametrize(
    ("ops", "held", "share"),
    [
        ([(0, 4)], [], 0),
        ([(0, 4)], [(1, 2)], 1 / 4),
        ([(0, 4)], [(1, 3), (2, 3), (0, 1)], 3 / 4),
        ([(0, 2), (4, 6)], [(1, 5)], 2 / 4),
        ([(0, 2), (4, 6)], [(2, 4)], 0),
        ([(0, 1), (1, 2), (2, 3)], [(0, 9)], 1),
        ([], [(0, 9)], 0),
    ],
)
def test_beside(ops: list, held: list, share: float) -> None:
    assert extra_ratio(ops, held) == pytest.approx(share)


def test_a_plan_by_hand() -> None:
    """F takes 1 and B 2, messages nothing. Stage 1 posts F0 and F1 at 0, and F1 is there at 2: F0
    runs beside it from 1 on. Stage 0 posts B0 at 2, when F1 is done, and B1 at 6, when B0 is: it
    has nothing to compute until they are there."""
    played = play(TWO, unit_table(TWO))
    times = {(r.stage, str(r.op)): (r.start, r.stop) for r in played.records}
    assert times[1, "F0"] == (1, 2) and times[0, "B0"] == (4, 6) and times[0, "B1"] == (7, 9)
    assert resident_ratios(played) == (0, pytest.approx(1 / 6))
