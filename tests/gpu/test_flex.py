"""Megatron's flex dispatcher: losses of alltoall, by DeepEP where it is, or by its stand-in.

On GPUs the package itself exchanges tokens, which wants a GPU for each rank. Over the reference of
Transformer Engine's kernels it is the stand-in of its API (tests/stand_ins).
"""

import importlib.util
from pathlib import Path

import pytest

from megatron_epp.mcore.patching import emulated_engine

# ruff: noqa: F811  fixtures of another module
from tests.gpu.test_multi_gpu import require_gpus
from tests.gpu.test_training import corpus, words  # noqa: F401
from tests.mcore.runs import PROGRAM, ROOT, trained

pytestmark = pytest.mark.gpu

WITH_STAND_IN = (str(ROOT / "tests" / "mcore" / "with_deep_ep.py"),)
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "epp": True,
    "epp_planner": "seq1f1b",  # slices: chunks of several sizes, in lockstep
}
FLEX = {"moe_token_dispatcher_type": "flex"}
EXCHANGES = {
    "alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "deepep": FLEX,
    "hybridep": {**FLEX, "moe_flex_dispatcher_backend": "hybridep"},
}
BUFFERS = {"deepep": "Buffer", "hybridep": "HybridEPBuffer"}  # of the package


@pytest.fixture(scope="module")
def losses(corpus, tmp_path_factory):
    """Losses of a training by that exchange, over two replicas that share the experts."""

    def of(exchange: str, noted: Path | None = None) -> list[float]:
        flags = words(corpus, train_iters=2, **EXPERTS, **EXCHANGES[exchange])
        with pytest.MonkeyPatch.context() as patch:
            if noted is not None:
                patch.setenv("EPP_STAND_IN", str(noted))
            program = PROGRAM if noted is None else WITH_STAND_IN
            run = trained(flags, processes=2, seconds=200, program=program)
        assert "these flags have no effect" not in run.output, run.output
        return run.losses

    return of


@pytest.fixture(scope="module")
def plain(losses) -> list[float]:
    return losses("alltoall")


@pytest.mark.parametrize("backend", BUFFERS)
def test_losses_are_those_of_alltoall(losses, plain, backend, engine, tmp_path) -> None:
    require_gpus(2)
    noted = None
    if emulated_engine.is_wanted():
        if backend == "deepep":
            pytest.skip("needs a GPU; over its stand-in: tests/mcore/test_flex.py")
        noted = tmp_path / "noted"
    elif importlib.util.find_spec("deep_ep") is None:
        pytest.skip("needs GPUs and deep_ep")
    elif not hasattr(importlib.import_module("deep_ep"), BUFFERS[backend]):
        pytest.skip(f"needs a deep_ep with {BUFFERS[backend]}")
    assert losses(backend, noted) == pytest.approx(plain, rel=0.01)
    if noted is not None:
        assert f"{BUFFERS[backend]} 0" in noted.read_text()
