"""Loops of others on real processes, against the plain model; and what a certificate notices."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.certify.command import BOUND, BatchVerdict, verdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import GPT, LLAMA
from tests.certify.backend import certify_checked, main
from tests.certify.trial import CheckedTrial, read_checked
from tests.mcore.certified import certified, models
from tests.mcore.fault_injection import inject

pytestmark = pytest.mark.everything

TABLES = Path(__file__).with_name("faults")


def trial(degrees: Degrees, batches: int, llama: str = "", **others) -> CheckedTrial:
    """``llama``: flags that its model has besides."""
    layers = f" --num-layers {2 * degrees.pp}"
    sequence = " --sequence-parallel" if degrees.tp > 1 else ""
    flags = models(f"{LLAMA}{layers}{sequence} {llama}", GPT + layers)
    return CheckedTrial(degrees, flags, batches, timeout=90.0, **others)


WINDOWS = "--window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable"
# Both ranks share a micro-batch's rows, and the experts among them.
EXPERTS = (
    "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 352 --moe-token-dispatcher-type "
    "alltoall --moe-router-load-balancing-type none --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 704"
)


# Of a micro-batch, its padding too; not of a document, as with --epp.
AUXILIARY = EXPERTS.replace(
    "balancing-type none", "balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
)


@pytest.mark.parametrize(
    ("level", "degrees", "batches", "llama", "others"),
    [
        (
            "level0",
            Degrees(2, 2, 1),
            8,
            f"{WINDOWS} {AUXILIARY}",
            {},
        ),  # orders are planned from the third call
        ("level1", Degrees(2, 1, 2), 6, WINDOWS, {"overlap": True, "lora_rank": 2}),
    ],
)
def test_loops_compute_what_the_plain_model_computes(
    level, degrees, batches, llama, others
) -> None:
    _, judged = certified(trial(degrees, batches, llama, loop=level, **others))
    assert {batch.coverage.loss for batch in judged} == {"tokens", "mean", "sequence", "sequences"}
    assert (sum(batch.coverage.halved for batch in judged) > 0) == (degrees.pp > 1)
    assert (sum(batch.coverage.cut for batch in judged) > 0) == (level == "level1")
    for batch in judged:
        assert batch.coverage.messages == 2 * (degrees.pp - 1) * degrees.tp * batch.coverage.chunks
        assert "gradient reduction" in batch.coverage.collectives
        assert degrees.pp == 1 or {"call", "plan text"} <= set(batch.coverage.collectives)
    assert "certified: " in verdict(judged)
    assert "values in the caller's order" in verdict(judged)


@pytest.mark.parametrize(
    ("degrees", "llama", "kind"),
    [
        (Degrees(1, 2, 1), AUXILIARY, "encoder"),
        pytest.param(Degrees(1, 2, 1, cp=2), AUXILIARY, "subclass", marks=pytest.mark.slow),
    ],
)
def test_slices_of_models_of_others(degrees, llama, kind) -> None:
    """An encoder that sees whole documents once; rows of a slice over context-parallel ranks, and
    experts among these, balanced over a micro-batch as Megatron balances them."""
    _, judged = certified(trial(degrees, 4, llama, loop="level1", loop_model=kind))
    assert sum(batch.coverage.cut for batch in judged) > 0
    shares = [batch.coverage.collectives["outputs of a slice"] > 0 for batch in judged]
    assert all(shares) == (degrees.cp > 1)


def test_loops_that_share_a_micro_batch_over_context_parallel_ranks() -> None:
    """Rows cut side by side and by document, experts over the same ranks; in one batch the schedule
    takes each rank for the only one."""
    lines: list[str] = []
    degrees = Degrees(1, 1, 1, cp=2)
    judged = certify_checked(
        trial(degrees, 6, EXPERTS, loop="level0", interfere=TABLES / "context.py"), lines.append
    )
    assert [batch.number for batch in judged] == [0, 2, 4, 1, 3, 5]
    by_loss = {batch.number: batch for batch in judged}
    mean = by_loss.pop(2)
    assert all(batch.passed for batch in by_loss.values()), "\n".join(lines)
    assert {batch.coverage.loss for batch in by_loss.values()} == {
        "tokens",
        "sequence",
        "sequences",
    }
    assert all(batch.coverage.collectives["loop's own context"] > 0 for batch in judged)
    assert mean.coverage.loss == "mean" and mean.loss_error <= BOUND
    assert mean.gradient_error == pytest.approx(0.5)


def test_interleaved_pipelines_compute_what_the_plain_model_computes() -> None:
    """Megatron's own parts, two a rank, in arbitrary orders, with overlapped reductions; of one
    draw parts read something else than the others."""
    lines: list[str] = []
    words = ("--loop", "level0", "--pp", "2", "--dp", "2", "--overlap", "--batches", "6")
    asked = read_checked([*words, "--placement", "interleaved 2"])
    judged = certify_checked(replace(asked, interfere=TABLES / "interleaved.py"), lines.append)
    wrong = [batch.number for batch in judged if not batch.passed]
    assert len(judged) == 6 and wrong == [4, 5], "\n".join(lines)
    assert sum(batch.coverage.halved for batch in judged) > 0


def test_replicas_that_share_experts_run_one_order() -> None:
    """An arbitrary one, of micro-batches of any lengths; nothing is split by those of one."""
    lines: list[str] = []
    shared = ["--loop", "level0", "--ep", "2", "--dp", "2"]
    judged = certify_checked(read_checked([*shared, "--batches", "2"]), lines.append)
    assert all(batch.passed and batch.coverage.halved == 0 for batch in judged), "\n".join(lines)
    assert "2 replicas in lockstep" in lines[0]
    assert all(batch.coverage.collectives["expert exchange"] > 0 for batch in judged)


def test_the_command_line() -> None:
    with pytest.raises(ValueError, match="--loop level2: expected level0 or level1"):
        main(["--loop", "level2"])
    with pytest.raises(ValueError, match="--ep 0: expected at least 1"):
        main(["--loop", "level0", "--ep", "0"])
    with pytest.raises(ValueError, match="--batches 0: expected at least 1"):
        main(["--loop", "level1", "--batches", "0"])
    with pytest.raises(ValueError, match="--loop-model encoder: of slices; give --loop level1"):
        main(["--loop", "level0", "--loop-model", "encoder"])
    with pytest.raises(ValueError, match="--placement v: loops run pipelines that Megatron builds"):
        main(["--loop", "level0", "--placement", "v"])
    with pytest.raises(ValueError, match="--placement: slices of loops run one stage a rank"):
        main(["--loop", "level1", "--placement", "interleaved 2"])
    with pytest.raises(ValueError, match="--loop-model other: expected subclass or encoder"):
        main(["--loop", "level1", "--loop-model", "other"])
    for more, said in (
        (["--loop", "level1"], "--loop level1: on GPUs in bf16; give --dtype bf16, or no --device"),
        (["--loop=level0", "--cp=2", "--dtype=bf16"], "over context-parallel ranks on CPUs alone"),
    ):
        with pytest.raises(ValueError, match=said):
            main(["--device", "cuda", *more])
    with pytest.raises(ValueError, match="--window-size: a loop's attention over context-parallel"):
        main(["--loop", "level0", "--cp", "2", *WINDOWS.split(), *LLAMA.split(), "--num-layers=2"])
    with pytest.raises(ValueError, match="ranks is certified without auxiliary losses; give none"):
        main(["--loop", "level0", "--cp=2", *AUXILIARY.split(), *LLAMA.split(), "--num-layers=2"])


@pytest.fixture(scope="module")
def with_faults() -> Mapping[str, BatchVerdict]:
    """One stage, in slices."""
    flags = models(f"{LLAMA} --num-layers 2")
    return inject(TABLES / "slices.py", CheckedTrial(Degrees(1, 1, 1), flags, loop="level1"))


@pytest.mark.parametrize("way", ["nothing", "nothing again"])
def test_the_untouched_schedule_passes(with_faults, way) -> None:
    assert with_faults[way].passed and with_faults[way].coverage.cut > 0, with_faults[way]


def test_values_at_other_places_are_noticed(with_faults) -> None:
    batch = with_faults["return in the order run"]
    assert batch.loss_error > 1e6 * BOUND and batch.gradient_error <= BOUND


@pytest.mark.parametrize("way", ["forget a gradient", "scale by chunks", "drop returned gradients"])
def test_wrong_gradients_are_far_beyond_the_bound(with_faults, way) -> None:
    batch = with_faults[way]
    assert batch.gradient_error > 1e6 * BOUND and batch.loss_error <= BOUND, batch


def test_a_loss_of_other_outputs_is_noticed(with_faults) -> None:
    assert with_faults["lose a slice for the loss"].loss_error > 1e6 * BOUND


def test_a_collective_that_is_not_on_the_list_is_refused(with_faults) -> None:
    (problem,) = with_faults["meet in between"].problems
    assert problem.startswith("not on the list: barrier over default_pg by ")
