"""Megatron's flex dispatcher under ``--epp``, over a stand-in of DeepEP's published API: numbers of
alltoall, rows as its buffers want them, and what does not run, by name."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_epp.ir import Step
from megatron_epp.mcore.kinds.moe import limits
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from tests.mcore.runs import flags, trained, write_corpus

pytestmark = pytest.mark.everything

PROGRAM = (str(Path(__file__).with_name("with_deep_ep.py")),)
# A token goes to one expert: whatever brings it there and back, nothing is added up.
SPREAD = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 16,
    "moe_router_dtype": "fp32",
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "bf16": True,
    "global_batch_size": 6,
    "split": "80,20,0",
    "eval_iters": 1,
    "eval_interval": 2,
    "epp": True,
    "epp_planner": "seq1f1b",
    "epp_memory_budget_gib": 0.0002,
}
FLEX = {"moe_token_dispatcher_type": "flex"}
LENGTHS = [120, 20, 30, 8, 90, 100, 12] * 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two replicas in lockstep: by alltoall, and by both backends of flex; what the
    stand-in wrote of each."""
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "documents", LENGTHS)
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, exchange in {
            "alltoall": {"moe_token_dispatcher_type": "alltoall"},
            "deepep": FLEX,
            "hybridep": {**FLEX, "moe_flex_dispatcher_backend": "hybridep"},
        }.items():
            folder = tmp_path_factory.mktemp(name)
            patch.setenv("EPP_STAND_IN", str(folder / "noted"))
            words = flags(corpus, epp_record=folder / "records", **SPREAD, **exchange)
            run = trained(words, program=PROGRAM)
            noted = folder / "noted"
            lines = noted.read_text().splitlines() if noted.exists() else []
            steps = [Step.parse(one.read_text()) for one in sorted(folder.glob("records/*.step"))]
            made[name] = run, [line.split() for line in lines], steps
    return made


def validated(run) -> list[float]:
    return [float(value) for value in re.findall(r"lm loss value: (\S+)", run.output)]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_it_computes_what_alltoall_computes(runs, backend) -> None:
    plain, run = runs["alltoall"][0], runs[backend][0]
    assert len(plain.losses) == 3
    assert (run.losses, run.grad_norms) == (plain.losses, plain.grad_norms)
    rounding = 5e-6 if backend == "hybridep" else 0  # it pads rows
    assert validated(run) == pytest.approx(validated(plain), rel=rounding, abs=0)
    assert validated(plain)
    assert "these flags have no effect" not in run.output
    steps = runs[backend][2]
    assert {step.lockstep for step in steps} == {2}
    plans = [plan for step in steps for plan in step.plans]
    assert any(not chunk.spans for plan in plans for chunk in plan.chunks)
    assert any("f" in mode for plan in plans for of in plan.recompute for mode in of)


def test_deepep_gets_the_rows_that_there_are(runs) -> None:
    noted = [words for words in runs["deepep"][1] if words[0] == "dispatch"]
    rows = {int(count) for _, _, count in noted}
    assert 1 in rows and len(rows) > 5  # of an empty chunk one, as Megatron's routers want
    assert len([words for words in runs["deepep"][1] if words[0] == "Buffer"]) == 2


def test_hybridep_gets_as_many_rows_of_every_rank_and_buffers_at_once(runs) -> None:
    """The stand-in asserts the first, and that buffers do not grow within an iteration."""
    noted = runs["hybridep"][1]
    of_ranks = [
        [count for what, rank, count in noted if (what, rank) == ("dispatch", number)]
        for number in "01"
    ]
    assert of_ranks[0] == of_ranks[1] and all(int(count) % 64 == 0 for count in of_ranks[0])
    made = [int(count) for what, _, count in noted if what in ("HybridEPBuffer", "grown")]
    assert len(made) <= 4 and max(made) >= max(map(int, of_ranks[0]))
    assert all(rows & (rows - 1) == 0 for rows in made)


# ------------------------------------------------------------------ what does not run


def asked(**changes) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "num_experts": 4,
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "deepep",
            "moe_enable_deepep": False,
            "bf16": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
        }
        | changes
    )


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"moe_flex_dispatcher_backend": "hybridep"}, True),
        ({"moe_flex_dispatcher_backend": "hybridep", "moe_enable_deepep": True}, True),
        ({"moe_flex_dispatcher_backend": "ncclep"}, False),
        ({"bf16": False}, False),
        ({"expert_model_parallel_size": 1}, False),
    ],
)
def test_what_flex_does_not_run_becomes_alltoall_and_is_refused_elsewhere(
    monkeypatch, changes, runs
) -> None:
    from megatron.core.transformer.moe import fused_a2a

    row = next(row for row in MoEKind.LIMITS if "flex" in row.what)
    (taken,) = (row for row in MoEKind.REPLACED if "moe_enable_deepep" in row.names)
    args = asked(**changes)
    assert taken.same(args) and row.reason("training", args)
    assert row.reason("slices", argparse.Namespace(config=args))
    assert taken.neutral(args) == {"moe_token_dispatcher_type": "alltoall"}
    for name in limits._BACKENDS.values():
        monkeypatch.setattr(fused_a2a, name, True)
    assert taken.same(args) is not runs
    assert (row.reason("training", args) is None) is runs
    for words in ("deep_ep", "bf16", "on one rank", "ncclep"):
        assert words in row.what
    # What is not flex, and flags without their package's exchange, are left alone.
    assert not taken.same(asked(moe_token_dispatcher_type="alltoall", bf16=False))
    assert row.reason("training", asked(moe_token_dispatcher_type="allgather")) is None
    assert row.reason("training", asked(moe_token_dispatcher_type="another"))


def test_packages_are_told_apart(monkeypatch) -> None:
    """An older deep_ep has no HybridEP."""
    from megatron.core.transformer.moe import fused_a2a

    monkeypatch.setattr(fused_a2a, "HAVE_DEEP_EP", True)
    assert not limits._cannot_flex(asked())
    assert limits._cannot_flex(asked(moe_flex_dispatcher_backend="hybridep"))
