"""Methods without a pipeline: every document once, near the optimum, in ``compare`` where they are
found."""

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import Bounds, LinearConstraint, milp

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

from device_groups import METHODS, flexsp
from device_groups.costs import group_costs

from megatron_epp.ir import PlanError
from megatron_epp.planner import COMPARISON_METHODS, Options, comparison_methods
from tests.planner.cases import LENGTHS, machine, machines
from tests.planner.test_planners import QUICK


def test_compare_finds_them_in_a_checkout_and_says_so_where_it_does_not(
    monkeypatch, tmp_path, capsys
) -> None:
    from megatron_epp.__main__ import main

    words = "compare --lengths wlb --batches 1 --global-batch-size 8 --context 8192 --effort 0"
    machine_words = "--model gpt-7b --device a100-80g --pp 2 --cp 8"
    assert tuple(comparison_methods.comparison_methods()) == COMPARISON_METHODS
    monkeypatch.setattr(comparison_methods, "_FOLDER", tmp_path)
    comparison_methods.comparison_methods.cache_clear()
    try:
        assert main([*words.split(), *machine_words.split()]) == 0
        told = capsys.readouterr().out
        assert "flexsp and megatron-hybrid-cp are absent" in told and "\nflexsp  " not in told
        assert main([*words.split(), *machine_words.split(), "--planner", "flexsp"]) != 0
        assert "are absent" in capsys.readouterr().err
    finally:
        comparison_methods.comparison_methods.cache_clear()


def test_the_order_of_the_batch_changes_nothing() -> None:
    lengths = [30_000, 400, 9_000, 700, 2_500, 800, 12_000, 90]
    for plan in METHODS.values():
        one, other = (plan(batch, machine(), Options()) for batch in (lengths, lengths[::-1]))
        assert one.seconds == other.seconds and one.peak_bytes == other.peak_bytes


def test_no_documents_and_bad_lengths_are_refused() -> None:
    for plan in METHODS.values():
        with pytest.raises(ValueError, match="at least one length"):
            plan([], machine(), Options())
        with pytest.raises(ValueError, match="expected at least 1"):
            plan([5, 0], machine(), Options())


@pytest.mark.parametrize("name", METHODS)
@given(LENGTHS, machines())
@settings(QUICK, max_examples=8)
def test_groups_compute_every_document_once(name, lengths, cost) -> None:
    try:
        planned = METHODS[name](lengths, cost, Options())
    except PlanError:
        return
    held = sorted(d for b in planned.batches for group in b.documents for d in group)
    assert held == list(range(len(lengths)))
    devices = 2 ** ((cost.layout.stages * cost.layout.cp).bit_length() - 1)
    for batch in planned.batches:
        assert sum(batch.degrees) <= devices
        assert all(group for group in batch.documents)
    assert planned.seconds == pytest.approx(sum(max(b.seconds) for b in planned.batches))
    assert planned.fits
    assert max(planned.peak_bytes) <= cost.device_budget_bytes[0] + 1
    assert planned.lower_bound_seconds <= planned.seconds


@pytest.mark.parametrize("seed", range(8))
def test_flexsp_is_within_two_percent_of_its_milp(seed) -> None:
    """Eight devices, a dozen documents: degrees, groups and assignment in one program."""
    random = Random(seed)
    cost = machine(pp=1)
    costs = group_costs(cost)
    lengths = np.array(
        sorted((int(random.lognormvariate(7.7, 0.9)) + 50 for _ in range(12)), reverse=True)
    )
    solved = flexsp.solve(lengths, costs)
    assert solved is not None
    optimum = flexsp_milp(lengths, costs)
    assert optimum * (1 - 1e-6) <= solved[2] <= 1.02 * optimum


def flexsp_milp(lengths: np.ndarray, costs) -> float:
    """Variables: C, whether group g is there, whether document k is on g."""
    groups = [
        which for which, degree in enumerate(costs.degrees) for _ in range(costs.devices // degree)
    ]
    documents = len(lengths)
    pairs = lengths * (lengths + 1) / 2
    width = 1 + len(groups) * (1 + documents)

    def at(group: int, document: int | None = None) -> int:
        return 1 + group * (1 + documents) + (0 if document is None else 1 + document)

    rows, low, high = [], [], []
    for number, which in enumerate(groups):
        time, memory, there = np.zeros((3, width))
        time[0], time[at(number)] = -1, costs.chunk_seconds[which]
        for k in range(documents):
            time[at(number, k)] = (
                costs.token_seconds[which] * lengths[k] + costs.pair_seconds[which] * pairs[k]
            )
            memory[at(number, k)] = lengths[k] / costs.most_tokens[which]
            there[at(number, k)] = 1
        there[at(number)] = -documents
        rows += [time, memory, there]
        low += [-np.inf] * 3
        high += [0, 1, 0]
    devices = np.zeros(width)
    for number, which in enumerate(groups):
        devices[at(number)] = costs.degrees[which]
    rows.append(devices)
    low.append(-np.inf)
    high.append(costs.devices)
    for k in range(documents):
        once = np.zeros(width)
        for number in range(len(groups)):
            once[at(number, k)] = 1
        rows.append(once)
        low.append(1)
        high.append(1)
    cost = np.zeros(width)
    cost[0] = 1
    integrality = np.ones(width)
    integrality[0] = 0
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(0, np.where(integrality, 1, np.inf)),
        integrality=integrality,
        options={"mip_rel_gap": 1e-3, "time_limit": 20},
    )
    return float(found.mip_dual_bound)
