#!/usr/bin/env python3
"""Draws the README's picture: one batch packed and planned, one above the other on one time axis.

    python docs/draw_plans.py [FILE.svg]        default: docs/plan_against_packing.svg

Simulated: llama3-8b, four stages of four H100-80G each, the analytic cost model. Both plans hold at
most what packing holds on each stage. A test makes the picture again and compares.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.cost.build import named_cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.replicas import plan_step
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.show.paint import draw_timelines
from megatron_epp.show.svg import to_svg
from megatron_epp.show.timeline import Timeline, timeline_of
from megatron_epp.sim.play import play

FILE = Path(__file__).with_name("plan_against_packing.svg")
CONTEXT = 32768
LENGTHS = (32768, 28000, 21000, 15000, 12000, 9000, 8000, 7000, 6000, 5000, 4000, 4000, 3000, 3000)
WIDTH = 1400.0


def plans() -> tuple[PlannedReplica, PlannedReplica, list[Timeline]]:
    """(packing, epp, the timelines of both)."""
    cost = named_cost("llama3-8b", "h100-80g", pp=4, tp=4, **AS_TRAINED)
    ample = cost.replace(device_budget_bytes=(1e15,) * cost.layout.stages)
    options = Options(context=CONTEXT)
    (packing,) = plan_step(LENGTHS, ample, options, "packing").planned
    budget = tuple(map(float, packing.peak_bytes))
    within = cost.replace(device_budget_bytes=budget)
    (epp,) = plan_step(LENGTHS, within, options, "epp").planned
    drawn = [
        timeline_of(play(found.plan, within.table(found.plan)), title, budget)
        for found, title in ((packing, "packed, 1F1B"), (epp, "planned, same memory"))
    ]
    return packing, epp, drawn


def picture() -> str:
    """The SVG."""
    *_, (packed, planned) = plans()
    return to_svg(draw_timelines(packed, planned, width=WIDTH))


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    path.write_text(picture())
    packing, epp, _ = plans()
    print(f"wrote {path}: {packing.seconds / epp.seconds:.2f} times packing's speed, simulated;")
    for name, found in (("packing", packing), ("planned", epp)):
        gib = " ".join(f"{peak / 2**30:.1f}" for peak in found.peak_bytes)
        print(f"{name}: {found.chunks} chunks, bubbles {found.bubble_ratio:.1%}, peaks {gib} GiB")
