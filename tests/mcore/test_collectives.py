"""What goes over process groups while Megatron's trainer trains: the planned messages, and
collectives of the list.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_epp.ir import Kind, Step, Transfer, lower
from tests.certify.allowed_collectives import (
    DATA_GROUP,
    SCHEDULE,
    AllowedCollective,
    callers_of,
    name_of,
)
from tests.certify.comm_recorder import Collective, MessageRecord
from tests.mcore.runs import flags, trained, write_corpus

LENGTHS = [97, 3, 40, 260, 9, 12, 65, 30, 2, 128, 129, 21, 5, 77, 18, 150, 33, 8, 61, 11]
ITERATIONS = 3
HIDDEN = 32
WATCHED = str(Path(__file__).with_name("watched.py"))
TRAINING = "megatron.training.training."
UTILS = "megatron.training.utils.common_utils."
# What Megatron's trainer adds around the schedule in an iteration.
TRAINER = (
    AllowedCollective(
        "gradient norm",
        "MODEL_PARALLEL_GROUP|INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        callers_of(
            "megatron.core.optimizer.clip_grads",
            "megatron.core.optimizer.optimizer",
            "megatron.core.optimizer.distrib_optimizer",
        ),
        "clipping, zeros, gradients that are not finite: over the whole model",
    ),
    AllowedCollective(
        "optimizer's outcome",
        "MODEL_PARALLEL_GROUP",
        callers_of(
            UTILS + "logical_and_across_model_parallel_group",
            UTILS + "reduce_max_stat_across_model_parallel_group",
        ),
        "whether the step was taken, the norm and the zeros for the log",
    ),
    AllowedCollective(
        "loss for the log",
        DATA_GROUP,
        callers_of(TRAINING + "train_step", TRAINING + "evaluate"),
        "loss and tokens over the replicas",
    ),
    AllowedCollective(
        "tokens for the log",
        "default_pg",
        callers_of(TRAINING + "consume_seqlen_stats_in_iteration"),
        "true tokens and TFLOP/s of documents of many lengths",
    ),
    AllowedCollective(
        "re-run machine",
        "default_pg",
        callers_of("megatron.core.rerun_state_machine"),
        "whether a rank wants the iteration again (--rerun-mode)",
    ),
    AllowedCollective(
        "losses of routers for the log",
        "PIPELINE_MODEL_PARALLEL_GROUP|TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
        callers_of("megatron.core.transformer.moe.moe_logging.MoEMetricsTracker._sync_metrics"),
        "over the stages, and over the ranks that share documents",
    ),
    AllowedCollective(
        "timers",
        "default_pg",
        callers_of("megatron.core.timers", TRAINING + "print_datetime"),
        "barriers around what is timed, the slowest rank for the log",
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two stages with tied embeddings, trained for three iterations and evaluated after two."""
    folder = tmp_path_factory.mktemp("watched")
    words = flags(
        write_corpus(folder / "documents", LENGTHS),
        train_iters=ITERATIONS,
        eval_iters=1,
        eval_interval=2,
        split="60,40,0",
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        epp=True,
        epp_planner="packing",
        epp_record=folder / "plans",
    )
    words.remove("--untie-embeddings-and-output-weights")
    trained(words, program=(WATCHED, str(folder)))
    return folder


def seen(folder: Path, rank: int) -> tuple[list[Collective], list[MessageRecord]]:
    traffic = json.loads((folder / f"traffic-{rank}.json").read_text())
    return (
        [Collective(**one) for one in traffic["collectives"]],
        [MessageRecord(**one) for one in traffic["messages"]],
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_are_on_the_list(folder, rank) -> None:
    collectives, _ = seen(folder, rank)
    names = [name_of(one, (*SCHEDULE, *TRAINER)) for one in collectives]
    strangers = [str(one) for one, name in zip(collectives, names, strict=True) if name is None]
    assert not strangers
    counts = Counter(names)
    steps = ITERATIONS + 1  # the evaluation too
    assert counts["plan text"] == 2 * steps  # its header and itself
    assert counts["plan digest"] == steps
    assert counts["report"] == steps
    assert counts["token count"] == 2 * ITERATIONS
    assert counts["embedding copies"] == ITERATIONS
    # Once per bucket: the tied embedding has one of its own.
    assert counts["gradient reduction"] in (ITERATIONS, 2 * ITERATIONS)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    """Two replicas that share experts, trained for two iterations."""
    folder = tmp_path_factory.mktemp("experts")
    words = flags(
        write_corpus(folder / "documents", LENGTHS),
        train_iters=2,
        pipeline_model_parallel_size=1,
        num_experts=2,
        expert_model_parallel_size=2,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        use_distributed_optimizer=True,
        epp=True,
        epp_planner="packing",
    )
    trained(words, program=(WATCHED, str(folder)))
    return folder


@pytest.mark.parametrize("job", ["folder", "experts"])
def test_every_group_has_spoken_before_the_first_iteration(job, request) -> None:
    """NCCL's communicators take memory when groups first speak; at the end of an iteration torch
    holds it all."""
    folder = request.getfixturevalue(job)
    for rank in (0, 1):
        traffic = json.loads((folder / f"traffic-{rank}.json").read_text())
        sizes, spoken = traffic["sizes"], {one["group"] for one in traffic["collectives"]}
        several = {group for group in spoken if sizes[group] > 1 and group != "epp_control"}
        assert len(several) > 2
        assert several <= set(traffic["at start"])


def sends(step: Step, stage: int) -> list[tuple[str, int]]:
    """(group, elements) of what the plan makes ``stage`` send."""
    (plan,) = step.plans
    return [
        (f"epp_{op.message.payload.name.lower()}", plan.chunks[op.chunk].tokens * HIDDEN)
        for op in lower(plan)[stage]
        if isinstance(op, Transfer) and op.kind is Kind.SEND
    ]


def test_messages_are_the_planned_ones(folder) -> None:
    """In training as the recorded plans say; in the evaluation after two iterations, forwards."""
    steps = [Step.parse(path.read_text()) for path in sorted((folder / "plans").glob("*.step"))]
    assert len(steps) == ITERATIONS
    for rank in (0, 1):
        _, mine = seen(folder, rank)
        _, others = seen(folder, 1 - rank)
        assert {message.peer for message in mine} == {1 - rank}
        sent = [(m.group, m.elements) for m in mine if m.way == "send"]
        assert sent == [(m.group, m.elements) for m in others if m.way == "receive"]
        before = sends(steps[0], rank) + sends(steps[1], rank)
        after = sends(steps[2], rank)
        assert sent[: len(before)] == before
        assert sent[-len(after) :] == after
        evaluation = sent[len(before) : -len(after)]
        assert {group for group, _ in evaluation} == ({"epp_activation"} if rank == 0 else set())
