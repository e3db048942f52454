"""Experts spread over replicas: certified, trained, refused. Faults: test_faults.py."""

import re
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, RandomBatch, StepCoverage, modes_drawn
from megatron_epp.certify.command import BatchVerdict, verdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.ir import Step, check_op_templates
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_EXPERTS
from tests.certify.backend import certify_checked
from tests.mcore.models import HYBRID_MOE, QWEN3, TRAINED_EXPERTS, V3, V3_MOE
from tests.mcore.resumes import LENGTHS, OPTIMIZER, logged, require_equal, tensors
from tests.mcore.runs import Run, flags, train, trained, write_corpus

pytestmark = pytest.mark.everything

MODEL = QWEN3 + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
# Latent attention, a dense first layer, shared experts, further tokens predicted.
DEEPSEEK = f"{V3} {V3_MOE} --num-layers 4 --mtp-num-layers 1 "
SHORT = MODEL.replace("--num-layers 4", "--num-layers 2")
# As Megatron has it by default: gathered, and split over the tensor-parallel ranks.
BY_DEFAULT = SHORT.replace("--moe-token-dispatcher-type alltoall", "--sequence-parallel").replace(
    "--expert-tensor-parallel-size 1", ""
)


def spread(model: str, ranks: int) -> tuple[tuple[str, ...], ...]:
    return ((*model.split(), "--expert-model-parallel-size", str(ranks)),)


# In turn: the third batch is of the third, and offloads a layer of attention of an empty chunk,
# which saves nothing that is worth a copy; others carry states.
IN_TURN = (
    spread(MODEL, 2)
    + spread(DEEPSEEK, 2)
    + spread(f"{LLAMA} {HYBRID_MOE} --hybrid-layer-pattern=*M*|E*G", 2)
)
TRIALS = {
    "two replicas, two stages": Trial(Degrees(pp=2, tp=1, dp=2), IN_TURN, batches=6, overlap=True),
    "two replicas of two context ranks": Trial(
        Degrees(pp=1, tp=1, dp=2, cp=2), spread(SHORT, 4), batches=2
    ),
    "two replicas of two tensor ranks": Trial(
        Degrees(pp=1, tp=2, dp=2), spread(BY_DEFAULT, 2), batches=2
    ),
}
MODES = modes_drawn(EXECUTABLE + OF_EXPERTS)
FRAME = Frame(61, (2,), replicas=4, modes=MODES, lockstep=4)


KINDS = ("packed", "split", "hybrid", "empty", "recomputed", "selective", "halved")


def fragile(step: Step) -> bool:
    """Whether the replicas have documents of several lengths, and one an empty chunk."""
    return len(set(step.lengths)) > 2 and any(
        not chunk.spans for plan in step.plans for chunk in plan.chunks
    )


def shows(way: str, drawn: RandomBatch) -> bool:
    """Whether the fault must show (test_faults.py); what is untouched has all kinds."""
    coverage = StepCoverage.of(drawn)
    every = "nothing" not in way or all(getattr(coverage, kind) for kind in KINDS)
    return every and fragile(drawn.step)


def require_proved(lines: list[str], judged: list[BatchVerdict]) -> None:
    """Gradients, auxiliary losses, z-loss and the counts that move the bias, with any letters,
    split backwards, and chunks that only one replica has."""
    assert all(batch.passed for batch in judged), "\n".join(lines)
    for kind in KINDS:
        assert sum(getattr(batch.coverage, kind) for batch in judged) > 0, kind
    assert "empty in lockstep" in verdict(judged)
    exchanges = {"expert exchange", "expert bias", "gradient reduction", "token count"}
    assert all(exchanges <= set(batch.coverage.collectives) for batch in judged)


@pytest.mark.parametrize("name", TRIALS)
def test_random_blocks_compute_what_the_plain_model_computes(name) -> None:
    trial = TRIALS[name]
    lines: list[str] = []
    judged = certify_checked(trial, lines.append)
    require_proved(lines, judged)
    said = [line for line in lines if " replicas in lockstep" in line]
    assert len(said) == len(trial.models)
    assert all(f"{trial.degrees.dp} replicas in lockstep" in line for line in said)
    by_alltoall = ["alltoall" in model for model in trial.models]
    assert ["large chunks in two halves of rows" in line for line in said] == by_alltoall


# ------------------------------------------------------------------ inside the trainer

SPREAD = {
    **TRAINED_EXPERTS,
    **OPTIMIZER,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "split": "80,20,0",
    "eval_iters": 1,
    "eval_interval": 2,
    "save_interval": 2,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", LENGTHS * 2)


@pytest.fixture(scope="module")
def three(corpus, tmp_path_factory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("three")
    ahead = {"epp_plan_ahead": True, **SPREAD}
    run = trained(flags(corpus, epp=True, save=folder, epp_record=folder / "records", **ahead))
    return folder, run


def test_plans_of_training_are_in_lockstep(three) -> None:
    folder, run = three
    steps = [Step.parse(path.read_text()) for path in sorted(folder.glob("records/*.step"))]
    assert len(steps) == 3
    for step in steps:
        assert step.lockstep == 2
        check_op_templates(step)
        assert step.plans[0].predicted.seconds == step.plans[1].predicted.seconds
    assert len(logged("z_loss", run.output)) == 3
    assert "validation loss at iteration 2" in run.output


def test_a_resumed_run_is_the_same_bit_for_bit(corpus, three, tmp_path) -> None:
    folder, straight = three
    before = tmp_path / "before"
    before.mkdir()
    (before / "iter_0000002").symlink_to(folder / "iter_0000002")
    (before / "latest_checkpointed_iteration.txt").write_text("2")
    for kept in folder.glob("epp-*"):
        (before / kept.name).write_bytes(kept.read_bytes())
    words = flags(corpus, epp=True, load=before, save=tmp_path / "resumed", **SPREAD)
    resumed = trained(words)
    assert resumed.losses[0] == straight.losses[-1]
    mine = tensors(tmp_path / "resumed" / "iter_0000003", tmp_path / "a.pt")
    theirs = tensors(folder / "iter_0000003", tmp_path / "b.pt")
    assert any("expert_bias" in name for name in mine)
    require_equal(mine, theirs)


def test_no_memory_in_one_replica_repeats_the_iteration_for_all(corpus, three, tmp_path) -> None:
    """Both ranks find none at the same place of iteration 2; losses and biases are those of the run
    that had enough."""
    folder, free = three
    program = (str(Path(__file__).parent / "hungry.py"), "together")
    changes = {**SPREAD, "save": tmp_path / "hit", "exit_interval": 2}
    hit = trained(flags(corpus, epp=True, **changes), program=program)
    assert "repeated with less memory" in hit.output
    assert hit.output.count("out of memory (none for the scores)") == 2
    assert len(hit.losses) == 2
    assert hit.losses == pytest.approx(free.losses[:2], rel=1e-5)
    z_loss = logged("z_loss", free.output)[:2]
    assert logged("z_loss", hit.output) == pytest.approx(z_loss, rel=1e-5)
    one, other = (
        tensors(saved / "iter_0000002", tmp_path / f"{number}.pt")
        for number, saved in enumerate((folder, tmp_path / "hit"))
    )
    biases = [name for name in one if name.endswith("expert_bias")]
    assert biases and all(one[name].equal(other[name]) for name in biases)


def test_a_limit_of_one_replica_is_that_of_its_block(corpus, three) -> None:
    """Rank 1 alone is above it; both give up at that op, and plan with less."""
    _, free = three
    peaks = [float(x) for x in re.findall(r"peak ([0-9.]+) of ", free.output)]
    program = (str(Path(__file__).parent / "hungry.py"), "limit")
    changes = {**SPREAD, "save_interval": None, "eval_iters": 0}
    words = flags(corpus, epp=True, epp_memory_limit_gib=0.85 * max(peaks) / 1024, **changes)
    run = trained(words, program=program)
    assert "repeated with less memory" in run.output
    assert "out of memory (on another rank of this stage)" in run.output
    assert run.losses == pytest.approx(free.losses, rel=1e-5)


def test_a_plan_for_free_replicas_is_refused_with_status_2(corpus, three, tmp_path) -> None:
    folder, _ = three
    step = Step.parse((folder / "records" / "iteration-000001.step").read_text())
    given = tmp_path / "given.step"
    given.write_text(str(step).replace("lockstep 2\n", ""))
    changes = {**SPREAD, "epp_plan": given, "save_interval": None}
    run = train(flags(corpus, epp=True, **changes))
    assert run.status and set(run.statuses) <= {2, -15} and 2 in run.statuses, run.output
    assert (
        len(run.errors) == 1
        and (
            "is for replicas that run freely; this job's experts are sharded over 2 replicas each, "
            "which run together: expected a step with 'lockstep 2'"
        )
        in run.errors[0]
    ), run.output
