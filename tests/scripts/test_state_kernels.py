"""Kernels of mamba_ssm and flash-linear-attention, where they are installed, in Triton's
interpreter."""

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from tests.programs import python

pytestmark = pytest.mark.everything

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "upstream" / "state_kernels.py"
# The script says how they are put into a folder of PYTHONPATH. Not importlib.util.find_spec, which
# finds the stand-ins that other modules of this process may have put in their place.
INSTALLED = all(PathFinder.find_spec(name) is not None for name in ("mamba_ssm", "fla"))


@pytest.mark.skipif(not INSTALLED, reason="needs the kernels of mamba_ssm and fla")
def test_slices_compute_what_whole_documents_do() -> None:
    done = python(SCRIPT, seconds=900, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["mamba", "delta"]
    assert all(line.endswith(": ok") for line in lines)


@pytest.mark.skipif(INSTALLED, reason="they are installed")
def test_missing_packages_are_said_in_one_line() -> None:
    done = python(SCRIPT, seconds=900, OMP_NUM_THREADS="1")
    assert done.returncode == 2
    assert done.stdout == ("mamba_ssm fla: not installed; the first lines of this script say how\n")
