"""Pipelines and tensor parallelism over NCCL: the same losses as one GPU, with the flags of
examples/pretrain_gpt_epp.sh."""

import pytest
import torch

from megatron_epp.mcore.patching import emulated_engine

# ruff: noqa: F811  fixtures of another module
from tests.gpu.test_training import ITERATIONS, corpus, trained_from, weights  # noqa: F401

pytestmark = pytest.mark.gpu

EXAMPLE = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "no_gradient_accumulation_fusion": None,
    # Several buckets, and the cost model that a training measures for itself.
    "ddp_bucket_size": 100_000,
    "epp_cost_model": None,
}


def require_gpus(count: int) -> None:
    """With emulated kernels, ranks of this host: two, over gloo."""
    there = 2 if emulated_engine.is_wanted() else torch.cuda.device_count()
    if there < count:
        pytest.skip(f"needs {count} GPUs, there are {there}")


@pytest.fixture(scope="module")
def plain(corpus, weights) -> list[float]:
    """Losses of one GPU."""
    require_gpus(2)
    losses = trained_from(weights, corpus, 1, 1, 1, **EXAMPLE).losses
    assert len(losses) == ITERATIONS
    return losses


@pytest.mark.parametrize(
    ("pp", "tp", "gpus"),
    [(2, 1, 2), (1, 2, 2), (1, 1, 2), (2, 2, 4), (2, 1, 4), (4, 2, 8), (8, 1, 8)],
    ids=lambda value: str(value),
)
def test_losses_over_nccl_are_those_of_one_gpu(
    pp, tp, gpus, corpus, weights, plain, engine
) -> None:
    require_gpus(gpus)
    run = trained_from(weights, corpus, pp, tp, gpus, **EXAMPLE)
    assert run.losses == pytest.approx(plain, rel=0.01)
