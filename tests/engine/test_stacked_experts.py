"""Experts as one product: faults, losses, and checkpoints of a product for each expert."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.degrees import Degrees
from tests.certify.trial import CheckedTrial
from tests.engine.test_certificate import ENGINE, EXPERTS, GROUPED, models
from tests.mcore.certified import certified
from tests.mcore.fault_injection import inject_alone, names, require_shown
from tests.mcore.runs import PROGRAM, Run, flags, trained, write_corpus

pytestmark = [pytest.mark.gpu, pytest.mark.everything]

TABLE = Path(__file__).with_name("faults") / "experts.py"
LENGTHS = [5, 80, 17, 120, 33, 2, 64, 9, 100, 41, 28, 77] * 2
ITERATIONS, SAVED = 4, 2
ROUNDING = 5e-4  # of bf16: each way rounds gradients at other places, as halves do
APART = ("-m", "tests.engine.grouped_apart")
MODEL = {
    "epp": True,
    "bf16": True,
    "num_layers": 2,
    "pipeline_model_parallel_size": 1,
    "transformer_impl": "transformer_engine",
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": "1e-2",
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "train_iters": ITERATIONS,
    "lr": "2e-2",
    "lr_decay_style": "constant",
}
OVERLAPPED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    # Several buckets, whose boundaries lie within a linear of the experts.
    "ddp_bucket_size": 5000,
}


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    return inject_alone(TABLE, EXPERTS + GROUPED + ENGINE, seed=0)


@pytest.mark.parametrize("way", names(TABLE))
def test_whatever_is_broken_shows(judged, way) -> None:
    require_shown(judged[way], way)


def test_four_replicas_share_experts() -> None:
    """Two experts on a rank; of two ranks that share them: test_certificate.py."""
    model = EXPERTS + GROUPED + " --expert-model-parallel-size 4"
    _, judged = certified(CheckedTrial(Degrees(1, 1, 4), models(model), batches=2))
    assert all(batch.coverage.selective and batch.coverage.split for batch in judged)


@pytest.mark.parametrize("optimizer", [{}, OVERLAPPED], ids=["whole optimizer", "sharded"])
def test_checkpoints_go_both_ways(tmp_path, optimizer) -> None:
    """In the default format, which stores a sharded optimizer by its place in the buffers."""
    corpus = write_corpus(tmp_path / "corpus", LENGTHS)

    def run(program: tuple[str, ...], **changes: object) -> Run:
        return trained(flags(corpus, **MODEL, **optimizer, **changes), 2, program)

    def saved(program: tuple[str, ...], folder: Path) -> Run:
        return run(program, save=folder, save_interval=SAVED)

    def resumed(program: tuple[str, ...], folder: Path) -> list[float]:
        return run(program, load=folder, ckpt_step=SAVED).losses

    apart, stacked = saved(APART, tmp_path / "apart"), saved(PROGRAM, tmp_path / "stacked")
    assert len(set(apart.losses)) == ITERATIONS
    assert "experts: chunks stay whole, because of a product for each expert" in apart.output
    assert re.search("experts: chunks of [0-9]+ tokens or more in two halves", stacked.output)
    assert stacked.losses == pytest.approx(apart.losses, rel=ROUNDING)
    after = resumed(PROGRAM, tmp_path / "stacked")
    assert len(after) == ITERATIONS - SAVED and after[0] == stacked.losses[SAVED]
    assert resumed(PROGRAM, tmp_path / "apart") == pytest.approx(after, rel=ROUNDING)
    assert resumed(APART, tmp_path / "stacked") == pytest.approx(after, rel=ROUNDING)
