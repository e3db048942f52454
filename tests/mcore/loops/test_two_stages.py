"""Calls of a loop on two stages: Megatron's contract kept, bad calls ended on both ranks."""

from types import SimpleNamespace

import pytest

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


BAD = {
    "sliced twice": "rank 0: the forward step drew twice for one chunk: expected one draw",
    "sliced differ": "micro-batch 2 differs over ranks: documents of (10,) on rank 0, (11,) on ra",
    "count": "num_microbatches differs over the ranks of a pipeline: [3, 4]; expected one number",
    "early": "rank 0: the data iterator ended after 2 of the 4 micro-batches",
    "observed late": "attach(timeout=, observe=): expected in the process's first attach only",
    "half an adapter": "attach: the adapter has no function 'lengths'; expected lengths, rows and",
    "two chunks": "attach: 2 model chunks on a rank; expected one",
    "no GPT": "attach: a Linear holds no module of Megatron's with a decoder of Megatron's layers",
    "attached again": "attach: this model is attached already",
    "lying": "rank 0: the adapter's rows of micro-batch 1, document 0, tokens",
    "short masks": "rank 0: the adapter's rows of micro-batch",
    "no scalar": "rank 1: micro-batch",
    "no outputs": "rank 1: the forward step's output for",
    "circle": "rank 0: the adapter's prefixes of micro-batch 0: node 0 continues node 1; expected",
    "gap": "rank 0: the adapter's prefixes of micro-batch 0: node 1 holds tokens [7:20] of sequence"
    " 0, of 20; expected some from 5 on",
    "no end": "rank 0: the adapter's prefixes of micro-batch 0: sequence 0 ends with node 0; expec",
    "no forest": "rank 0: the adapter's prefixes of micro-batch 0 are list; expected what",
    "other tokens": "rank 0: the adapter's prefixes of micro-batch 0: 'tokens' of document 1 in [0",
    "shared in front": "the adapter's prefixes: what stands in front of the layers sees documents",
    "too long": "rank 0: the adapter says 300 tokens for document 0 of micro-batch 1; expected 1",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_end_on_both_ranks_with_one_line(answers, case) -> None:
    for rank in range(2):
        said = answers[rank][case]
        assert said.startswith("ValueError: " + BAD[case]), said
        assert "\n" not in said


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_go_with_the_loops_own_recompute_and_with_a_plans(answers, rank) -> None:
    worst, of_slices, of_whole = answers[rank]["recomputed"]
    assert worst < 1e-12
    assert "f" in of_slices and "f" in of_whole  # a document of 60 tokens does not fit kept


def test_no_more_is_recomputed_than_it_takes(answers) -> None:
    assert "k" in answers[1]["recomputed"][1] and "k" in answers[1]["recomputed"][2]


def test_what_is_no_scalar_is_shown(answers) -> None:
    assert "the loss has shape (1, " in answers[0]["no scalar"]
    assert "'loss_mask' has shape" in answers[1]["short masks"]


def test_a_loops_own_mistake_is_raised_where_it_happened(answers) -> None:
    assert answers[1]["broken"] == "RuntimeError: the loop's own mistake"
    assert answers[0]["broken"] == "LoopFailed: rank 1: RuntimeError: the loop's own mistake"


def test_a_rank_that_cannot_begin_leaves_nobody_waiting(answers) -> None:
    """The other one may have begun, so Megatron's schedule cannot run the call."""
    for case in ("no pipeline", "one stage"):
        assert answers[1][case] == "KeyError: 'what nobody foresaw'"
        assert answers[0][case] == "LoopFailed: rank 1: KeyError: 'what nobody foresaw'"


@pytest.mark.parametrize("case", ["goes", "whole again", "at last"])
def test_after_bad_calls_good_ones_go_well(answers, case) -> None:
    assert [answer[case] for answer in answers] == ["went well"] * 2


def test_megatrons_own_schedules_come_back(answers) -> None:
    assert all(answer["removed"] for answer in answers)


# ------------------------------------------------------------------ what is Megatron's to run


def call_of(**config: object) -> dict[str, object]:
    """A training call's keywords, of a model with that configuration."""
    return {
        "forward_step_func": print,
        "data_iterator": None,
        "model": [SimpleNamespace(config=SimpleNamespace(**config))],
        "num_microbatches": 4,
        "seq_length": 1,
        "micro_batch_size": 1,
    }


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
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.loops.call_arguments import LoopCall, megatron_only

    assert megatron_only(LoopCall.of(call_of() | changed), 2) == says


@pytest.mark.parametrize("name", ["_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"])
def test_micro_batches_that_say_on_how_many_ranks_they_lie_are_megatrons(name, monkeypatch) -> None:
    """Their process groups tell, where no setting of the model does: dynamic_context_parallel of
    verl is no field of Megatron's."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron.core import parallel_state as mpu

    from megatron_epp.mcore.loops.call_arguments import LoopCall, megatron_only

    monkeypatch.setattr(mpu, name, {2: object()}, raising=False)
    says = "context parallelism by micro-batch (its process groups are there)"
    assert megatron_only(LoopCall.of(call_of(variable_seq_lengths=True)), 2) == says


def test_settings_that_only_megatron_acts_on() -> None:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.capabilities.table import TABLE
    from megatron_epp.mcore.loops.call_arguments import LoopCall, megatron_only

    rows = {row.what for row in TABLE if row.calls is not None}
    for name in (
        "overlap_moe_expert_parallel_comm",
        "hybrid_context_parallel",
        "dynamic_context_parallel",
        "moe_paged_stash",
        "fine_grained_activation_offloading",
        "defer_embedding_wgrad_compute",
        "num_microbatches_with_partial_activation_checkpoints",
        "overlap_p2p_comm",
    ):
        call = LoopCall.of(call_of(**{name: True}))
        assert name in (megatron_only(call, 2) or "")
        rows -= {row.what for row in TABLE if row.calls is not None and row.calls(call)}
    for name, streams in (
        ("enable_mhc_connections", True),
        ("enable_hyper_connections", True),
        ("hc_count", 4),
    ):
        for stages in (1, 2):
            config = {name: streams, "pipeline_model_parallel_size": stages}
            call = LoopCall.of(call_of(**config))
            wide = "several residual streams (mHC), whose messages are wider than hidden_size"
            assert megatron_only(call, stages) == (wide if stages > 1 else None)
            rows -= {row.what for row in TABLE if row.calls is not None and row.calls(call)}
    assert {what.split(" (")[0] for what in rows} == {
        "CUDA graphs",
        "fully sharded data parallelism",
    }
