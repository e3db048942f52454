"""Experts over replicas in slices of loops, against the plain model; and what would show."""

from pathlib import Path

import pytest

from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA
from tests.certify.trial import ENCODER, CheckedTrial
from tests.mcore.certified import certified, models
from tests.mcore.fault_injection import inject, names, require_shown

FAULTS = Path(__file__).with_name("faults") / "lockstep.py"
MOE = (
    f"{LLAMA} --num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 352 "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
BALANCED = "--moe-router-load-balancing-type {} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 "
BIASED = (
    "--moe-router-load-balancing-type none --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias "
)
KINDS = BALANCED.format("aux_loss"), BALANCED.format("seq_aux_loss"), BIASED


def trial(degrees: Degrees, ranks: int, kinds=KINDS, batches: int = 6, **others) -> CheckedTrial:
    sequence = "--sequence-parallel " if degrees.tp > 1 else ""
    experts = f"--expert-model-parallel-size {ranks} {sequence}"
    flags = models(*(MOE + kind + experts for kind in kinds))
    return CheckedTrial(degrees, flags, batches, timeout=90.0, loop=True, **others)


def require_in_lockstep(judged: list[BatchVerdict]) -> None:
    """Slices, split backwards and losses of several kinds, with exchanges between replicas."""
    assert sum(batch.coverage.cut for batch in judged) > 0
    assert all("expert exchange" in batch.coverage.collectives for batch in judged)


def test_two_replicas_share_experts() -> None:
    asked = trial(Degrees(pp=2, tp=1, dp=2), 2, (KINDS[0], BIASED), batches=2)
    lines, judged = certified(asked)
    require_in_lockstep(judged)
    assert any("2 replicas in lockstep" in line for line in lines)


@pytest.mark.everything
@pytest.mark.parametrize(
    ("degrees", "overlap"),
    [(Degrees(pp=2, tp=1, dp=4), True), (Degrees(pp=2, tp=2, dp=2), False)],
    ids=["four replicas", "two replicas of two tensor ranks"],
)
def test_four_ranks_share_experts(degrees, overlap) -> None:
    _, judged = certified(trial(degrees, 4, overlap=overlap))
    require_in_lockstep(judged)
    assert {batch.coverage.loss for batch in judged} >= {"tokens", "mean", "sequences"}


@pytest.mark.everything
def test_an_encoder_stands_before_shared_experts() -> None:
    """An empty chunk has hidden states of the encoder's shape, of no document."""
    asked = trial(Degrees(pp=1, tp=1, dp=2), 2, KINDS[:1], batches=4, loop_model=ENCODER)
    _, judged = certified(asked)
    require_in_lockstep(judged)


@pytest.mark.everything
def test_samples_of_replicas_share_prefixes_and_experts() -> None:
    asked = trial(Degrees(pp=2, tp=1, dp=2), 2, KINDS[:2], batches=4, trees=True)
    _, judged = certified(asked)
    require_in_lockstep(judged)
    assert sum(batch.coverage.branches for batch in judged) > 0


@pytest.mark.everything
def test_whatever_is_broken_shows() -> None:
    judged = inject(FAULTS, trial(Degrees(pp=1, tp=1, dp=2), 2, (KINDS[0],)))
    for way in names(FAULTS):
        require_shown(judged[way], way)
