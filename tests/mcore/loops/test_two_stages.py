"""Calls of a loop on two stages: Megatron's contract kept, bad calls ended on both ranks."""

from types import SimpleNamespace

import pytest

from tests.mcore.loops.conftest import require_said

pytestmark = pytest.mark.everything

RANKS = 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["sliced", "whole"])
def test_hooks_and_returns_are_those_of_megatrons_schedule(answers, rank, mode) -> None:
    """Data in the caller's order, no_sync left at the last backward, finalize, timers, scaling."""
    stock, ours = answers[rank]["stock"], answers[rank][mode]
    assert ours[:2] == stock[:2]  # what a training call and two passes of forwards return
    if rank == 1:
        assert [item["rows"] for item in ours[0]] == [20, 60, 10, 33]
        assert len(set(ours[1][1])) == 4
    else:
        assert ours[0] == []
    calls = [event for event in ours[2] if event != "backward"]
    assert calls == [event for event in stock[2] if event != "backward"]
    assert calls[-1] == ["finalize", 1, 123 if rank else 0, True]
    assert ours[3]["forward-backward stop"] == 1
    if mode == "whole":
        # Megatron's hooks reduce during the last backward of the first stage, after it on others.
        assert ours[2].count("backward") == stock[2].count("backward") == (3 if rank == 0 else 4)
        assert ours[3] == stock[3]
    assert answers[rank]["worst"] < 1e-12


def test_slices_are_cut_and_whole_micro_batches_are_not(answers) -> None:
    for answer in answers:
        assert answer["chunks"][0] > 4


def test_the_example_of_an_own_adapter_computes_its_frameworks_gradients(answers) -> None:
    """examples/own_adapter.py, in slices, against Megatron's schedule on padded sequences."""
    for answer in answers:
        worst, chunks = answer["own adapter"]
        assert worst < 1e-12 and chunks > 4


def test_a_model_that_is_not_attached_runs_by_megatrons_schedule(answers) -> None:
    assert [answer["not attached"] for answer in answers] == [[True, 0]] * 2


def test_bad_calls_end_on_both_ranks_with_one_line(answers) -> None:
    for answer in answers:
        require_said(answer["bad"], 20)


def test_slices_go_with_the_loops_own_recompute_and_with_a_plans(answers) -> None:
    for answer in answers:
        worst, of_slices, of_whole = answer["recomputed"]
        assert worst < 1e-12
        assert "f" in of_slices and "f" in of_whole  # a document of 60 tokens does not fit kept
    assert "k" in of_slices and "k" in of_whole  # no more is recomputed than it takes


def test_a_loops_own_mistake_is_raised_where_it_happened(answers) -> None:
    assert answers[1]["broken"] == "RuntimeError: the loop's own mistake"
    assert answers[0]["broken"] == "LoopFailed: rank 1: RuntimeError: the loop's own mistake"


def test_a_rank_that_cannot_begin_leaves_nobody_waiting(answers) -> None:
    """The other one may have begun, so Megatron's schedule cannot run the call."""
    for case in ("no pipeline", "one stage"):
        assert answers[1][case] == "KeyError: 'what nobody foresaw'"
        assert answers[0][case] == "LoopFailed: rank 1: KeyError: 'what nobody foresaw'"


def test_after_bad_calls_good_ones_go_well(answers) -> None:
    """Before them in slices; after them whole micro-batches, and slices."""
    assert [answer["good"] for answer in answers] == [["went well"] * 3] * 2


def test_links_speak_again_where_groups_were_made_anew(answers) -> None:
    """Twice all groups but the world, then the world, and with it groups of ours: two ranks that
    first speak make a communicator, which is no work for the midst of a plan."""
    for worst, plans, late in (answer["made anew"] for answer in answers):
        assert worst < 1e-12 and plans == 3 and late == 0


def test_megatrons_own_schedules_come_back(answers) -> None:
    assert all(answer["removed"] for answer in answers)


# ------------------------------------------------------------------ what is Megatron's to run


def megatrons_reason(stages: int = 2, changed: dict | None = None, **config: object) -> str | None:
    """Why Megatron runs a training call of a model with that configuration; None if a plan can."""
    from megatron_epp.mcore.loops.call_arguments import megatron_only

    return megatron_only(call_of(changed, **config), stages)


def call_of(changed: dict | None = None, **config: object):
    from megatron_epp.mcore.loops.call_arguments import LoopCall

    keywords = {
        "forward_step_func": print,
        "data_iterator": None,
        "model": [SimpleNamespace(config=SimpleNamespace(**config))],
        "num_microbatches": 4,
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    return LoopCall.of(keywords | (changed or {}))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"something_new": 1}, "unknown arguments something_new"),
        ({"model": [1, 2]}, "several model chunks on a rank: slices run one"),
        ({"data_iterator": [1, 2]}, "one model chunk and 2 data iterators on a rank"),
        ({"adjust_tensor_shapes_fn": print}, "shapes that adjust_tensor_shapes_fn changes"),
        ({"pg_collection": object()}, "several modules with grids of their own"),
        ({"num_microbatches": 0}, "no micro-batch"),
    ],
)
def test_calls_that_are_left_to_megatron(changed, says) -> None:
    assert megatrons_reason(changed=changed) == says


@pytest.mark.parametrize("name", ["_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"])
def test_micro_batches_that_say_on_how_many_ranks_they_lie_are_megatrons(name, monkeypatch) -> None:
    """Their process groups tell, where no setting of the model does: dynamic_context_parallel of
    verl is no field of Megatron's."""
    assert megatrons_reason(variable_seq_lengths=True) is None
    from megatron.core import parallel_state as mpu

    monkeypatch.setattr(mpu, name, {2: object()}, raising=False)
    says = "context parallelism by micro-batch (its process groups are there)"
    assert megatrons_reason(variable_seq_lengths=True) == says


def test_settings_that_only_megatron_acts_on() -> None:
    assert megatrons_reason() is None
    from megatron_epp.mcore.capabilities.table import TABLE

    rows = [row for row in TABLE if row.of_call]
    for name in (
        "hybrid_context_parallel",
        "dynamic_context_parallel",
        "moe_paged_stash",
        "fine_grained_activation_offloading",
        "defer_embedding_wgrad_compute",
        "num_microbatches_with_partial_activation_checkpoints",
        "overlap_p2p_comm",
    ):
        assert name in (megatrons_reason(**{name: True}) or "")
        call = call_of(**{name: True})
        rows = [row for row in rows if row.reason("slices", call) is None]
    assert {row.what.split(" (")[0] for row in rows} == {
        "CUDA graphs",
        "fully sharded data parallelism, FSDP",
    }
