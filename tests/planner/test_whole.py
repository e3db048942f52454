"""Plans that leave every document whole, as where routers compare all tokens of one."""

import pytest

from megatron_epp.ir import check_op_templates, slices_of
from megatron_epp.planner import COMPARED, PLANNERS, TRAINING_LEVERS, Options, plan_step
from tests.planner.cases import machine

LENGTHS = [30_000, 400, 9_000, 700, 2_500, 800, 12_000, 90, 5_000, 3_300]


@pytest.mark.parametrize("planner", [name for name in COMPARED if PLANNERS[name].whole])
@pytest.mark.parametrize("width", [1, 2])
def test_no_document_is_cut(planner, width) -> None:
    """With any levers, in tight memory, where a plan of slices is faster."""
    for levers in (TRAINING_LEVERS, frozenset[str](), TRAINING_LEVERS - {"bins", "local"}):
        for room_gib in (60.0, 12.0):
            cost = machine(pp=4, room_gib=room_gib)
            options = Options(levers=levers, effort=1, lockstep=width, whole=True)
            made = plan_step(LENGTHS, cost, options, planner, width)
            check_op_templates(made.step)
            assert all(found.fits for found in made.planned)
            assert all(max(slices_of(plan).document) < 0 for plan in made.step.plans)
    cut = plan_step(LENGTHS, machine(), Options(effort=1), "epp")
    whole = plan_step(LENGTHS, machine(), Options(effort=1, whole=True), planner)
    assert max(slices_of(cut.step.plans[0]).document) >= 0
    assert cut.planned[0].seconds < whole.planned[0].seconds


def test_planners_that_cut_are_refused() -> None:
    for planner in (name for name, row in PLANNERS.items() if not row.whole):
        with pytest.raises(ValueError, match=f"^planner '{planner}' cuts documents, which must"):
            plan_step(LENGTHS, machine(), Options(whole=True), planner)
