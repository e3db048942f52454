"""Examples for frameworks: each starts theirs as it is, with what turns slices on."""

import os
import re
from pathlib import Path

import pytest

from tests.programs import BASH, run, stand_in

pytestmark = pytest.mark.everything

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
SAYS = 'echo "$(basename "$0") $VERL_USE_EXTERNAL_MODULES $*"'


def said(script: str, folder: Path, *words: str, **variables: str) -> str:
    path = f"{folder}:{os.environ['PATH']}"
    done = run(BASH, EXAMPLES / script, *words, cwd=folder, PATH=path, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_verls_script_is_started_with_the_module(tmp_path) -> None:
    stand_in(tmp_path / "examples/grpo_trainer/run_qwen3_8b_megatron.sh", SAYS)
    words = said("verl_grpo.sh", tmp_path, "trainer.nnodes=2", VERL=str(tmp_path))
    assert words == "run_qwen3_8b_megatron.sh verl_slices trainer.nnodes=2\n"


def test_a_command_of_swifts(tmp_path) -> None:
    stand_in(tmp_path / "megatron", SAYS)
    words = said("swift_sft.sh", tmp_path, "--seed", "3")
    assert words.startswith("megatron  sft --model ") and words.endswith("--seed 3\n")
    (plugin,) = re.findall(r"--external_plugins (\S+) --callbacks slices", words)
    assert Path(plugin) == EXAMPLES / "swift_slices.py"


def test_slurm_installs_the_wheel_in_the_container(tmp_path) -> None:
    stand_in(tmp_path / "scontrol", "echo first; echo second")
    stand_in(tmp_path / "python", SAYS)
    stand_in(tmp_path / "torchrun", SAYS)
    # As srun does with a container: options taken off, the command run.
    stand_in(tmp_path / "srun", 'while [[ $1 == --* ]]; do shift; done\n"$@"')
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    slurm["WHEEL"] = "megatron_epp-0.1.0-py3-none-any.whl"
    words = said("container.sbatch", tmp_path, "pretrain_gpt.py", "--bf16", **slurm)
    installed, ran = words.splitlines()
    assert installed.endswith("pip install --quiet megatron_epp-0.1.0-py3-none-any.whl")
    assert re.fullmatch(
        r"torchrun  --nnodes 2 --node-rank 1 .*--master-addr first .* pretrain_gpt.py --bf16", ran
    )
