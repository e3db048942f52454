"""The Slurm script, run with stand-ins for Slurm's commands and for Python."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.programs import BASH, ROOT, stand_in
from tests.waiting import LAST_RESORT_SECONDS, until

pytestmark = pytest.mark.everything

SCRIPT = ROOT / "examples" / "slurm" / "pretrain_llama_7b.sbatch"
# Two tasks of a job of two nodes with eight tasks each; their signals are Slurm's to send.
SRUN = """
for word in "$@"; do [[ $word == --cpus-per-task=* ]] && echo "$word" > "$OUT/srun"; done
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=16 SLURM_NNODES=2
for rank in 0 9; do
    SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 8)) "$@" &
    echo $! >> "$OUT/tasks"
done
wait
"""
# What a task runs: notes its world, and upon TERM takes a while for its checkpoint.
PYTHON = """
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $CUDA_DEVICE_MAX_CONNECTIONS $*" \\
    > "$OUT/rank-$RANK"
trap 'sleep 0.3; echo saved >> "$OUT/rank-$RANK"; exit 0' TERM
touch "$OUT/ready-$RANK"
for i in {1..600}; do sleep 0.1; done
"""


def test_a_task_per_gpu_has_time_for_its_checkpoint(tmp_path: Path) -> None:
    """Every task is the training itself, whom Slurm's TERM reaches and nobody kills after it."""
    commands, out = tmp_path / "bin", tmp_path / "out"
    out.mkdir()
    stand_in(commands / "srun", SRUN)
    stand_in(commands / "scontrol", "echo node-7; echo node-8")
    stand_in(commands / "python", PYTHON)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "OUT": str(out),
        "PYTHON": str(commands / "python"),
        "DATA": "corpus",
        "TOKENIZER": "corpus.model",
        "RUN": str(tmp_path / "run"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_CPUS_PER_TASK": "8",
    }
    with subprocess.Popen([BASH, str(SCRIPT)], cwd=tmp_path, env=environment) as job:
        until(lambda: len(list(out.glob("ready-*"))) >= 2 or job.poll() is not None)
        assert job.poll() is None
        for task in (out / "tasks").read_text().split():
            os.kill(int(task), signal.SIGTERM)
        assert job.wait(LAST_RESORT_SECONDS) == 0
    assert (out / "srun").read_text() == "--cpus-per-task=8\n"
    for rank, local in ((0, 0), (9, 1)):
        world, saved = (out / f"rank-{rank}").read_text().splitlines()
        assert world.startswith(f"{rank} {local} 16 8 32 -m megatron_epp.pretrain_gpt ")
        assert "--exit-signal-handler" in world.split()
        assert saved == "saved"


@pytest.mark.parametrize("name", ["pretrain_gpt_epp.sh", "slurm/pretrain_llama_7b.sbatch"])
def test_launch_scripts_never_ask_for_one_queue(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in text
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1\n" not in text
