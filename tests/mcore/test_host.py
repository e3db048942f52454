"""Megatron without a GPU, and the seams: in a process of its own, since torch is changed there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def in_a_process(*words: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # where there are GPUs, they are hidden
    }
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_inside_a_host_without_a_gpu():
    done = in_a_process(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/mcore/inside_host.py"
    )
    assert done.returncode == 0, done.stdout


def test_nothing_happens_on_import():
    done = in_a_process(
        "-c",
        "import os, torch; before = dict(os.environ), torch.zeros, torch.compile\n"
        "import megatron_epp.mcore.patching.cpu_host, megatron_epp.mcore.patching.patch_points\n"
        "import megatron_epp.mcore.job.job_exit\n"
        "import megatron_epp.mcore.trainer.entry, megatron_epp.pretrain_gpt, sys\n"
        "assert before == (dict(os.environ), torch.zeros, torch.compile)\n"
        "assert not any(name.split('.')[0] == 'megatron' for name in sys.modules)",
    )
    assert done.returncode == 0, done.stderr


def test_a_broken_transformer_engine_does_not_keep_megatron_from_starting(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise FileNotFoundError('the torch extension')")
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    install = "from megatron_epp.mcore.patching import cpu_host; cpu_host.install_cpu_host()\n"
    assert in_a_process("-c", start + "import megatron.core").returncode != 0
    done = in_a_process("-c", start + install + "import megatron.core")
    assert done.returncode == 0, done.stderr
