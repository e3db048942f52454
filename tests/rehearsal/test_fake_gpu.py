"""A stage's iteration on tensors that claim to be a GPU's: shapes, dtypes, places and waits."""

from pathlib import Path

import pytest
import torch

from tests.programs import ROOT, python

INSIDE = Path(__file__).parent / "on_fake_gpu.py"


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_a_stage_on_a_gpu_that_computes_no_numbers() -> None:
    words = ("-m", "pytest", "-x", "-q", "-pno:cacheprovider", INSIDE)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # where there are GPUs, tests/gpu asks them
    done = python(*words, seconds=900, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **hidden)
    assert done.returncode == 0, done.stdout
