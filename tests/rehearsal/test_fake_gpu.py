"""A stage's iteration on tensors that claim to be a GPU's: shapes, dtypes, places and waits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).parent / "on_fake_gpu.py"


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_a_stage_on_a_gpu_that_computes_no_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-pno:cacheprovider", str(INSIDE)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # where there are GPUs, tests/gpu asks them
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
