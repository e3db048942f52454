"""Chats with one system prompt, trained with --epp-share-from and without."""

import re
from pathlib import Path

import pytest

from megatron_epp.ir import Step
from tests.mcore.chats import CHATS, prepare, turns, write_chats
from tests.mcore.models import TRAINED_MOE
from tests.mcore.resumes import logged, tensors
from tests.mcore.runs import DOUBLE, Run, exact_losses, flags, train, trained

TOOLS = "Use the tools: search, read, write and run; ask where a word is not clear."
AGENTS = [
    turns(f"Task {number}", "I read it. " * (1 + number % 4), system=TOOLS) for number in range(10)
]
LEAST = 16


# Ranks of two replicas share the experts of a layer.
EXPERTS = {
    **TRAINED_MOE,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "moe_router_bias_update_rate": 0.1,
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    path = write_chats(folder / "agents.jsonl", [*AGENTS, *CHATS])
    assert prepare(path, folder / "made") == 0
    return path


def run(path: Path, **changes: object) -> list[str]:
    data = {
        "tokenizer_type": "SFTTokenizer",
        "tokenizer_model": path.parent / "made.tokenizer",
        "sft": True,
        "vocab_size": None,
        "data_cache_path": path.parent / "cached",
        "epp": True,
        "seq_length": 192,
        "max_position_embeddings": 192,
        "clip_grad": 0,
    }
    return flags(path, **data | {"global_batch_size": 8, "epp_share_from": LEAST} | changes)


@pytest.fixture(scope="module")
def shared(chats: Path) -> Run:
    record = chats.parent / "steps"
    return trained(run(chats, epp_record=record, train_iters=4), 4, DOUBLE)


def test_shared_prompts_are_computed_once_and_train_alike(chats: Path, shared: Run) -> None:
    whole = trained(run(chats, epp_share_from=0, train_iters=4), 4, DOUBLE)
    losses = exact_losses(shared)
    assert len(losses) == 4 and losses == pytest.approx(exact_losses(whole), rel=1e-12)
    assert shared.grad_norms == whole.grad_norms
    ((tokens, saved),) = re.findall(
        rf"--epp-share-from {LEAST}: of (\S+) tokens in the first 3 batches, (\S+) \(\d+%\)",
        shared.output,
    )
    assert int(saved.replace(",", "")) > 0.2 * int(tokens.replace(",", ""))
    assert "--epp-share-from" not in whole.output
    steps = [Step.parse(path.read_text()) for path in sorted(chats.parent.glob("steps/*.step"))]
    assert len(steps) == 4 and all(any(any(plan.prefixes) for plan in step.plans) for step in steps)
    # Megatron's log counts documents and their tokens as without sharing.
    tokens_of = [
        re.findall(r"epp iteration \d+: (\d+) tokens", one.output) for one in (shared, whole)
    ]
    assert tokens_of[0] == tokens_of[1] != []


@pytest.mark.everything
def test_experts_over_replicas_train_alike(chats: Path, tmp_path: Path) -> None:
    """Losses of routers, too; the optimizer's states and the experts' bias of the checkpoint."""
    runs, states = [], []
    for least in (LEAST, 0):
        folder = tmp_path / f"from {least}"
        how = {**EXPERTS, "save": folder, "save_interval": 2, "epp_record": folder / "steps"}
        words = run(chats, epp_share_from=least, train_iters=2, global_batch_size=16, **how)
        runs.append(trained(words, 4, DOUBLE))
        states.append(tensors(folder / "iter_0000002", tmp_path / f"{least}.pt"))
    shared, whole = runs
    assert exact_losses(shared) == pytest.approx(exact_losses(whole), rel=1e-12)
    for name in ("z_loss", "seq_load_balancing_loss"):  # printed with seven digits
        assert logged(name, shared.output) == logged(name, whole.output) != []
    steps = [Step.parse(path.read_text()) for path in sorted(tmp_path.glob("from 16/steps/*.step"))]
    assert len(steps) == 2 and all(step.lockstep == 2 for step in steps)
    assert all(any(any(plan.prefixes) for plan in step.plans) for step in steps)
    mine, theirs = states
    assert mine.keys() == theirs.keys() and all(
        any(what in name for name in mine) for what in ("expert_bias", "exp_avg_sq")
    )
    for name in mine:
        if mine[name].is_floating_point():
            error = (mine[name] - theirs[name]).norm()
            assert error <= 1e-12 * theirs[name].norm(), name


@pytest.mark.everything
def test_recorded_steps_and_a_resumed_run_follow(chats: Path, shared: Run) -> None:
    replayed = trained(run(chats, epp_plan=chats.parent / "steps", train_iters=4), 4, DOUBLE)
    assert exact_losses(replayed) == exact_losses(shared)
    saved = {"save": chats.parent / "saved", "save_interval": 2}
    trained(run(chats, train_iters=4, exit_interval=2, **saved), 4, DOUBLE)
    resumed = trained(run(chats, train_iters=4, load=saved["save"], **saved), 4, DOUBLE)
    assert exact_losses(resumed) == pytest.approx(exact_losses(shared)[2:], rel=1e-12)


@pytest.mark.everything
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"epp_planner": "packing"},
            "--epp-planner packing computes documents whole; give --epp-pl",
        ),
        (
            {"hidden_dropout": 0.1},
            "--epp-share-from: with --hidden-dropout 0.1 documents draw masks",
        ),
        ({"epp_share_from": -1}, "--epp-share-from: '-1': expected a whole number of at least 0"),
    ],
)
def test_what_cannot_share_is_one_line(chats: Path, changes: dict, said: str) -> None:
    ended = train(run(chats, **changes))
    assert ended.statuses == (2, 2) and len(ended.errors) == 1
    assert said in ended.errors[0]


@pytest.mark.everything
def test_plans_with_prefixes_need_the_flag(chats: Path, shared: Run) -> None:
    ended = train(run(chats, epp_share_from=0, epp_plan=chats.parent / "steps"), 4)
    assert ended.statuses == (2,) * 4 and len(ended.errors) == 1
    assert "once; those of the batch share 0 (--epp-share-from)" in ended.errors[0]
