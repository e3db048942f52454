"""Calls of two replicas that share experts: in lockstep, ended on all ranks, or Megatron's."""

import pytest

from megatron_epp.ir import Plan, check_op_template
from tests.mcore.loops.conftest import require_said

pytestmark = pytest.mark.everything

RANKS = 4


def test_slices_compute_what_megatrons_schedule_does(answers) -> None:
    for answer in answers:
        assert answer["attached"].endswith("; experts do not compute chunks in halves")
        assert answer["equal"] < 1e-12 and answer["whole"] < 1e-12
    plans = tuple(Plan.parse(answer["plan"]) for answer in answers[:2])
    check_op_template(plans)
    assert plans[0].documents != plans[1].documents and len(plans[0].chunks) > 4


def test_replicas_may_have_unequally_many_micro_batches(answers) -> None:
    """Three and one, packed and as padded samples, and a pass of forwards."""
    for answer in answers:
        assert answer["packed"] < 1e-12
    assert all(empty > 0 for _, empty in (answer["chunks"] for answer in answers[1::2]))
    assert [answer["forward only"] for answer in answers] == [0, 0, 3, 1]


def test_what_differs_over_replicas_is_one_line_on_all_ranks(answers) -> None:
    for answer in answers:
        require_said(answer["bad"], 4)


@pytest.mark.parametrize(
    ("name", "first", "says"),
    [
        ("before", 1, "RuntimeError: before the layers"),
        ("after", 1, "RuntimeError: after the layers"),
        ("loss", 3, "RuntimeError: in the loss"),
        ("rows", 1, "KeyError: 'no rows'"),
    ],
)
def test_an_error_of_one_replica_ends_the_call_on_all_ranks(answers, name, first, says) -> None:
    for rank, answer in enumerate(answers):
        own = rank % 2 == 1 and rank >= first
        assert answer["failed"][name] == (says if own else f"LoopFailed: rank {first}: {says}")


def test_what_slices_cannot_run_is_megatrons_on_all_ranks(answers) -> None:
    """Said once; with unequal numbers of micro-batches Megatron's schedule would hang."""
    for rank, answer in enumerate(answers):
        run, refused = answer["megatron"]
        assert run == ["went well", 0, rank == 0]
        assert refused[0].startswith("ValueError: calls with shapes that adjust_tensor_shapes_fn")
        assert "[3, 1, 3, 1] on their ranks" in refused[0]


def test_after_bad_calls_good_ones_go_well(answers) -> None:
    assert all(answer["good"] < 1e-12 for answer in answers)


def test_replicas_that_do_not_call_are_named(answers) -> None:
    assert [answer["missing"] for answer in answers] == [[1, 3], [], [1, 3], []]
