"""Megatron without a GPU, and the seams: in a process of its own, since torch is changed there."""

import pytest

from tests.mcore.runs import trained
from tests.programs import ROOT, python

# Where there are GPUs, they are hidden.
HOST = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_inside_a_host_without_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/mcore/inside_host.py")
    trained([], processes=0, program=program)


def test_nothing_happens_on_import():
    done = python(
        "-c",
        "import os, torch; before = dict(os.environ), torch.zeros, torch.compile\n"
        "import megatron_epp.mcore.patching.cpu_host, megatron_epp.mcore.patching.patch_points\n"
        "import megatron_epp.mcore.job.job_exit\n"
        "import megatron_epp.mcore.trainer.entry, megatron_epp.pretrain_gpt, sys\n"
        "assert before == (dict(os.environ), torch.zeros, torch.compile)\n"
        "assert not any(name.split('.')[0] == 'megatron' for name in sys.modules)",
        **HOST,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.everything
def test_a_broken_transformer_engine_does_not_keep_megatron_from_starting(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise FileNotFoundError('the torch extension')")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    install = "from megatron_epp.mcore.patching import cpu_host; cpu_host.install_cpu_host()\n"
    assert python("-c", start + "import megatron.core", **HOST).returncode != 0
    done = python("-c", start + install + "import megatron.core", **HOST)
    assert done.returncode == 0, done.stderr
