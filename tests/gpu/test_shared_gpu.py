"""Ranks that share one GPU: the losses of one rank.

Over NCCL, which believes them on hosts of their own (EPP_SHARE_GPUS), as the examples run: with
Transformer Engine's attention and vocabulary parallelism. Over gloo, messages go through the host's
memory.
"""

import os
from pathlib import Path

import pytest

from megatron_epp.mcore.patching import emulated_engine

# ruff: noqa: F811  fixtures of another module
from tests.gpu.test_multi_gpu import EXAMPLE
from tests.gpu.test_training import ITERATIONS, corpus, trained_from, weights  # noqa: F401

pytestmark = pytest.mark.gpu

ON_GPU = pytest.mark.skipif(
    emulated_engine.is_wanted(), reason="needs a GPU: NCCL, and more than two ranks"
)
SHARED = (str(Path(__file__).with_name("shared_gpu.py")),)
GLOO = {"epp_attention": "torch", "distributed_backend": "gloo"}
NCCL = {**EXAMPLE, "epp_attention": "te", "epp_vocab_parallel": "on"}


def require_no_mps() -> None:
    """Fail in one line where the driver's multi-process service runs, which the ranks would use."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (folder / "control").exists():
        pytest.fail(
            f"MPS runs on this host ({folder}), where ranks that share a GPU were out of memory "
            "when they started; stop it: echo quit | nvidia-cuda-mps-control",
            pytrace=False,
        )


def test_mps_is_named_before_ranks_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    require_no_mps()
    (tmp_path / "control").touch()
    with pytest.raises(pytest.fail.Exception, match=r"MPS runs on this host .*; stop it"):
        require_no_mps()


@pytest.mark.parametrize(
    ("backend", "pp", "tp"),
    [
        ("gloo", 2, 1),
        pytest.param("gloo", 4, 1, marks=ON_GPU),
        pytest.param("nccl", 2, 1, marks=ON_GPU),
        pytest.param("nccl", 4, 1, marks=ON_GPU),
        pytest.param("nccl", 2, 2, marks=ON_GPU),
    ],
    ids=lambda value: str(value),
)
def test_losses_are_those_of_one_rank(corpus, weights, backend, pp, tp) -> None:
    require_no_mps()
    changes: dict = dict(GLOO if backend == "gloo" else NCCL)
    # Each rank would take the whole device for its own.
    changes |= {"program": SHARED, "epp_memory_budget_gib": 2}
    alone = trained_from(weights, corpus, 1, 1, 1, **(changes | {"epp_vocab_parallel": None}))
    # With a measured cost model: messages between the stages are timed.
    measured = changes | {"epp_cost_model": None}
    spread = trained_from(weights, corpus, pp, tp, pp * tp, **measured)
    assert len(spread.losses) == ITERATIONS
    assert spread.losses == pytest.approx(alone.losses, rel=0.01)
