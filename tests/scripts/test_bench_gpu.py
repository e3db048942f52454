"""The GPU benchmarks, tried on a CPU with a tiny model: they run, and write what they promise."""

import re
from pathlib import Path

import pytest

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Plan, parse_records
from megatron_epp.sim.play import play
from tests.mcore.runs import train

pytestmark = pytest.mark.everything

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every markdown table, without its header."""
    found = re.findall(r"((?:^\|.*\|\n)+)", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


def test_a_stage_is_measured(tmp_path) -> None:
    output = tmp_path / "result.md"
    words = ["--device", "cpu", "--model", "tiny", "--repeats", "1"]
    words += ["--slices", "64", "128", "--contexts", "0", "128", "--lengths", "256"]
    words += ["-o", str(output)]
    done = train(words, processes=0, program=(str(BENCH / "gpu_stage.py"),))
    assert done.status == 0, done.output
    text = output.read_text()
    assert re.match(r"## \d{4}-\d\d-\d\d, commit \w", text)
    assert "`scripts/bench/gpu_stage.py --device cpu --model tiny" in text
    assert "A CPU with" in text and "Cost model off by: F: median" in text
    chunks, attention, stage = tables(text)
    assert [row[:2] for row in chunks] == [["64", "0"], ["64", "128"], ["128", "0"], ["128", "128"]]
    assert all(float(cell) > 0 for row in chunks for cell in row[2:7])
    # A recomputed backward takes longer; bytes are linear in tokens, so those held are foretold.
    assert all(float(row[9].rstrip("%")) == pytest.approx(0, abs=1) for row in chunks)
    for table in (attention, stage):
        assert [row[:2] for row in table] == [["256", "64"], ["256", "128"]]
        assert all(float(row[4]) > 0 for row in table)


def test_an_iteration_is_put_together(tmp_path) -> None:
    output, kept = tmp_path / "result.md", tmp_path / "kept"
    words = ["--device", "cpu", "--model", "tiny", "--layers", "4", "--pp", "2"]
    words += ["--context", "256", "--documents", "6", "--budget-gib", "0.01", "--repeats", "1"]
    words += ["--planners", "packing", "epp", "--keep", str(kept), "-o", str(output)]
    done = train(words, processes=0, program=(str(BENCH / "gpu_replay.py"),))
    assert done.status == 0, done.output
    ((packing, epp),) = tables(output.read_text())
    assert (packing[0], epp[0]) == ("packing", "epp") and packing[5] == "1.00"
    profile = Profile.from_json((kept / "profile.json").read_text())
    cost = Cost(StageLayout(profile, (2, 2)), (0.01 * GIB,) * 2)
    for row in (packing, epp):
        replayed, peak, promised = float(row[2]), float(row[8]), float(row[9])
        plan = Plan.parse((kept / f"{row[0]}.plan").read_text())
        records = parse_records((kept / f"{row[0]}.timed").read_text())
        assert int(row[1]) == len(plan.chunks)
        assert float(row[3]) == pytest.approx(play(plan, cost.table(plan)).seconds, rel=1e-3)
        assert peak == pytest.approx(promised, rel=0.05)
        # No iteration is shorter than its busiest stage.
        busy = [
            sum(r.seconds for r in records if r.stage == stage and r.op in plan.orders[stage])
            for stage in range(2)
        ]
        assert replayed >= 0.999 * max(busy)
