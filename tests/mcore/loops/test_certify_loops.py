"""Loops of others on real processes, against the plain model; and what a certificate notices."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.command import BOUND, BatchVerdict, verdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.processes import ChildLost
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


def test_loops_compute_what_the_plain_model_computes() -> None:
    asked = trial(Degrees(2, 1, 2), 6, WINDOWS, loop=True, overlap=True, lora_rank=2)
    _, judged = certified(asked)
    assert {batch.coverage.loss for batch in judged} == {"tokens", "mean", "sequence", "sequences"}
    assert sum(batch.coverage.halved for batch in judged) > 0
    assert sum(batch.coverage.cut for batch in judged) > 0
    for batch in judged:
        assert batch.coverage.messages == 2 * batch.coverage.chunks
        assert {"gradient reduction", "call"} <= set(batch.coverage.collectives)
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
    _, judged = certified(trial(degrees, 4, llama, loop=True, loop_model=kind))
    assert sum(batch.coverage.cut for batch in judged) > 0
    shares = [batch.coverage.collectives["outputs of a slice"] > 0 for batch in judged]
    assert all(shares) == (degrees.cp > 1)


def test_experts_over_replicas_are_refused() -> None:
    with pytest.raises(ChildLost, match="experts spread over replicas, in slices of loops"):
        certify_checked(read_checked(["--loop", "--ep", "2", "--dp", "2", "--batches", "2"]))


def test_the_command_line() -> None:
    with pytest.raises(ValueError, match="--ep 0: expected at least 1"):
        main(["--loop", "--ep", "0"])
    with pytest.raises(ValueError, match="--batches 0: expected at least 1"):
        main(["--loop", "--batches", "0"])
    with pytest.raises(ValueError, match="--loop-model encoder: of slices; give --loop"):
        main(["--loop-model", "encoder"])
    with pytest.raises(ValueError, match="--placement: slices of loops run one stage a rank"):
        main(["--loop", "--placement", "interleaved 2"])
    with pytest.raises(ValueError, match="--loop-model other: expected subclass or encoder"):
        main(["--loop", "--loop-model", "other"])
    said = "--loop: on GPUs in bf16; give --dtype bf16, or no --device"
    with pytest.raises(ValueError, match=said):
        main(["--device", "cuda", "--loop"])


@pytest.fixture(scope="module")
def with_faults() -> Mapping[str, BatchVerdict]:
    """One stage, in slices."""
    flags = models(f"{LLAMA} --num-layers 2")
    return inject(TABLES / "slices.py", CheckedTrial(Degrees(1, 1, 1), flags, loop=True))


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
