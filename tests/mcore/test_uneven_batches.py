"""Global batches that the replicas do not divide, and replicas without a document."""

import re
from types import SimpleNamespace

import pytest
from megatron.core import num_microbatches_calculator as counts

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import EXPERTS, LLAMA
from megatron_epp.ir import Step
from megatron_epp.mcore.patching import patch_points
from megatron_epp.mcore.patching.uneven_batches import SampleCount, UnevenMicroBatches
from tests.certify.trial import CheckedTrial, read_checked
from tests.mcore.certified import certified, models
from tests.mcore.runs import DOUBLE, Run, exact_losses, flags, trained

# Small batches of two documents, then of seven, for three replicas.
UNEVEN = {
    "epp": True,
    "pipeline_model_parallel_size": 1,
    "global_batch_size": None,
    "step_batch_size_schedule": "0:2 512:7",  # 512 / --seq-length: after four documents
    "eval_global_batch_size": 4,
    "eval_iters": 1,
    "eval_interval": 2,
    "split": "80,20,0",
    "train_iters": 4,
    "lr_decay_style": "constant",
    "clip_grad": 0,
}

# ------------------------------------------------------------------ Megatron's counts


def micro_batches(size: int | None, replicas: int, schedule: str | None = None) -> int:
    """Return Megatron's number after its calculator was built as a job builds it."""
    counts.unset_num_microbatches_calculator()
    try:
        counts.init_num_microbatches_calculator(
            0, None, size, 1, replicas, step_batch_size_schedule=schedule
        )
        counts.update_num_microbatches(5)  # it checks
        return counts.get_num_microbatches()
    finally:
        counts.unset_num_microbatches_calculator()


def test_megatrons_products_are_the_documents_of_a_batch() -> None:
    with pytest.raises(AssertionError, match="is not divisible"):
        micro_batches(7, 3)
    patch_points.allow_uneven_batches()
    try:
        for size in (1, 2, 7, 8):
            found = micro_batches(size, 3)
            assert isinstance(found, UnevenMicroBatches) and found >= 1
            assert 3 * 1 * found == found * 1 * 3 * 1 == size  # train(); train_step()
            assert type(3 * 1 * found) is int and 1 / found == pytest.approx(3 / size)
        assert type(micro_batches(6, 3)) is int and micro_batches(6, 3) == 2
        assert 4 * micro_batches(None, 4, "0:2 5:7") == 7
        assert 4 * micro_batches(None, 4, "0:2 6:7") == 2
    finally:
        patch_points.remove([patch_points.MICRO_BATCHES])
    with pytest.raises(AssertionError, match="is not divisible"):
        micro_batches(7, 3)


def test_a_trainer_that_counts_otherwise_ends() -> None:
    samples, source = SampleCount(), SimpleNamespace()
    for began, counted in ((14, 14), (21, 21), (28, 28)):
        samples.check(source, began, counted)
    samples.check(SimpleNamespace(), 0, 28)  # a phase begins with its first document
    samples.check(source, 7, 35)
    with pytest.raises(RuntimeError, match="Megatron counts 44 consumed samples where 42 doc"):
        samples.check(source, 14, 44)


# ------------------------------------------------------------------ certificates


@pytest.mark.parametrize(
    "documents", [2, *(pytest.param(n, marks=pytest.mark.everything) for n in (1, 7, 8))]
)
def test_any_number_of_documents_on_three_replicas(documents) -> None:
    model = models(f"{LLAMA} {EXPERTS} --num-layers 2")
    trial = CheckedTrial(Degrees(1, 1, 3), model, 1, overlap=True, documents=documents)
    _, (batch,) = certified(trial)
    assert batch.coverage.documents == documents
    assert batch.coverage.idle >= 3 - documents


def test_documents_of_certify_from_the_command_line() -> None:
    assert read_checked(["--dp", "3", "--documents", "2"]).documents == 2
    with pytest.raises(ValueError, match="--documents 0: expected at least 1"):
        read_checked(["--documents", "0"])
    with pytest.raises(ValueError, match="--documents 2: of Megatron's trainer"):
        read_checked(["--documents", "2", "--loop"])


# ------------------------------------------------------------------ training


def numbers(pattern: str, run: Run) -> list[str]:
    return re.findall(pattern, run.output)


@pytest.mark.everything
def test_losses_are_those_of_one_replica(corpus, tmp_path) -> None:
    """In training, in evaluation, on the way up of a batch-size schedule, and after a resume."""
    alone = trained(flags(corpus, **UNEVEN), 1, DOUBLE)
    how = {"save": tmp_path, "save_interval": 3, "epp_record": tmp_path / "records"}
    three = trained(flags(corpus, **UNEVEN, **how), 3, DOUBLE)
    assert len(exact_losses(alone)) == 4
    assert exact_losses(three) == pytest.approx(exact_losses(alone), rel=1e-12)
    consumed = r"consumed samples: +(\d+)"
    assert numbers(consumed, three) == numbers(consumed, alone) == ["2", "4", "11", "18"]
    evaluated = r"validation loss at iteration \d+.*?value: (\S+)"
    assert numbers(evaluated, three) == numbers(evaluated, alone)
    steps = [Step.parse(path.read_text()) for path in sorted(tmp_path.glob("records/*.step"))]
    assert [len(step.lengths) for step in steps] == [2, 2, 7, 7]
    assert [sum(not held for held in step.assignments) for step in steps] == [1, 1, 0, 0]
    for file in tmp_path.glob("latest*"):
        file.write_text("3")
    resumed = trained(flags(corpus, **UNEVEN, load=tmp_path), 3, DOUBLE)
    assert numbers(consumed, resumed) == ["18"]
    assert exact_losses(resumed) == exact_losses(three)[3:]
