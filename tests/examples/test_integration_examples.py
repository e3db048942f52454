"""Examples for frameworks: each starts theirs as it is, and the one line is there."""

import os
import re
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
SAYS = '#!/usr/bin/env bash\necho "$(basename "$0") $MEGATRON_EPP $*"\n'


def program(path: Path, text: str = SAYS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def said(script: str, folder: Path, *words: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", EXAMPLES / script, *words],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_their_scripts_are_started_with_the_line(tmp_path) -> None:
    program(tmp_path / "examples/grpo_trainer/run_qwen3_8b_megatron.sh")
    words = said("verl_grpo.sh", tmp_path, "trainer.nnodes=2", VERL=str(tmp_path))
    assert words == "run_qwen3_8b_megatron.sh 1 trainer.nnodes=2\n"
    program(tmp_path / "scripts/run-qwen3-4B.sh")
    assert said("slime_grpo.sh", tmp_path, SLIME=str(tmp_path)) == "run-qwen3-4B.sh 1 \n"


def test_a_command_of_swifts(tmp_path) -> None:
    program(tmp_path / "megatron")
    words = said("swift_sft.sh", tmp_path, "--seed", "3")
    assert words.startswith("megatron 1 sft --model ") and words.endswith("--seed 3\n")


def test_slurm_hands_the_line_into_the_container(tmp_path) -> None:
    program(tmp_path / "scontrol", "#!/usr/bin/env bash\necho first\necho second\n")
    program(tmp_path / "python")
    program(tmp_path / "torchrun")
    # As srun does with a container: options taken off, the command run.
    program(tmp_path / "srun", '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\n"$@"\n')
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    words = said("container.sbatch", tmp_path, "pretrain_gpt.py", "--bf16", **slurm)
    installed, ran = words.splitlines()
    assert installed.endswith("pip install --quiet megatron-epp")
    assert re.fullmatch(
        r"torchrun 1 --nnodes 2 --node-rank 1 .*--master-addr first .* pretrain_gpt.py --bf16", ran
    )


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_every_example_has_the_line(name) -> None:
    text = (EXAMPLES / name).read_text()
    asked = (
        r"^(export MEGATRON_EPP=1|ENV MEGATRON_EPP=1|import megatron_epp.ada| +- name: MEGATRON)"
    )
    assert len(re.findall(asked, text, re.M)) == 1
