"""Shares of compute time beside messages: intervals by hand, a plan by hand, and all planners'."""

from pathlib import Path

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Plan
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import COMPARED, PLANNERS
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


@pytest.mark.parametrize("planner", COMPARED)
def test_shares_of_planned_batches(planner: str) -> None:
    """Whoever computes waits for somebody at some time, and nobody always."""
    cost = named_cost("llama3-8b", "h100-80g", pp=4)
    lengths = [9000, 4000, 3000, 2500, 2000, 1500, 1000, 800]
    plan = PLANNERS[planner](lengths, cost, Options(context=16384, effort=0)).plan
    shares = resident_ratios(play(plan, cost.table(plan)))
    assert len(shares) == 4 and all(0 <= share < 1 for share in shares)
    assert max(shares) > 0
    alone = Plan.parse((Path(__file__).parents[1] / "golden" / "00-wlb.plan").read_text())
    assert len(resident_ratios(play(alone, unit_table(alone)))) == alone.ranks
