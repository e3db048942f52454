"""Methods without a pipeline: every document once, near the optimum, in ``compare`` where they are
found."""

from itertools import product
from random import Random

import numpy as np
import pytest
from device_groups import DIVIDE, METHODS, flexsp
from device_groups.costs import group_costs
from hypothesis import given, settings

from megatron_epp.cost.columns import CHUNKS
from megatron_epp.ir import PlanError
from megatron_epp.planner import comparison_methods
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.registry import COMPARISON_METHODS
from tests.planner.cases import LENGTHS, machine, machines
from tests.planner.test_planners import QUICK

pytestmark = pytest.mark.everything


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


def test_a_placement_changes_nothing() -> None:
    lengths, cost = [9_000, 700, 2_500, 800], machine()
    placed = placed_cost(cost, "v")
    assert placed is not None
    for plan in METHODS.values():
        assert plan(lengths, placed, Options()).seconds == plan(lengths, cost, Options()).seconds


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
    ordered = SortedBatch.of(lengths).lengths
    layers = sum(cost.layout.layers)
    costs = [group_costs(cost.with_vocabulary(False), recompute) for recompute in (0, layers)]
    devices = 2 ** ((cost.layout.stages * cost.layout.cp).bit_length() - 1)
    fit = [each for each in costs if ordered[0] <= each.most_tokens[-1]]
    for note, batches in (candidate for each in fit for candidate in DIVIDE[name](ordered, each)):
        held = sorted(d for _, groups in batches for group in groups for d in group)
        assert held == list(range(len(lengths))), note
        for which, groups in batches:
            assert sum(costs[0].degrees[which]) <= devices
            assert all(len(group) for group in groups)
    assert planned.fits
    assert max(planned.peak_bytes) <= cost.device_budget_bytes[0] + 1
    assert planned.lower_bound_seconds <= planned.seconds


# All ways to divide four devices into groups of 2^number.
MIXES = ((2,), (1, 1), (1, 0, 0), (0, 0, 0, 0))


@pytest.mark.parametrize("seed", range(6))
def test_flexsp_is_within_two_percent_of_the_best_assignment(seed) -> None:
    random = Random(seed)
    costs = group_costs(machine(pp=1).replace(cp=4))
    drawn = (int(random.lognormvariate(7.7, 0.9)) + 50 for _ in range(6))
    lengths = np.array(sorted(drawn, reverse=True))
    adds, best = costs.document_seconds(lengths), np.inf
    for mix in MIXES:
        for groups in product(range(len(mix)), repeat=len(lengths)):
            held = [np.equal(groups, group) for group in set(groups)]
            numbers = [mix[group] for group in set(groups)]
            pairs = list(zip(held, numbers, strict=True))
            if all(lengths[of].sum() <= costs.most_tokens[n] for of, n in pairs):
                slowest = max(adds[of, n].sum() + costs.seconds[n, CHUNKS] for of, n in pairs)
                best = min(best, slowest)
    solved = flexsp.solve(lengths, costs)
    assert solved is not None
    assert best * (1 - 1e-9) <= solved[2] <= 1.02 * best
