"""The rehearsal of the Slurm script needs a slurmctld; without one it says so in one line."""

import os
import shutil
from pathlib import Path

import pytest

from tests.programs import BASH, run

pytestmark = pytest.mark.everything

SCRIPT = Path(__file__).parents[2] / "tests" / "rehearsal" / "slurm.sh"


def test_without_slurm_the_rehearsal_says_in_one_line_what_to_install(tmp_path: Path) -> None:
    for tool in ("dirname", "mktemp"):
        os.symlink(shutil.which(tool) or tool, tmp_path / tool)
    folder = tmp_path / "folder"
    done = run(BASH, SCRIPT, folder, only={"PATH": str(tmp_path), "SBIN": ""})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "slurm rehearsal: munged is missing: apt-get install slurm-wlm munge"
    ]
    assert not folder.exists()


def test_the_rehearsal_is_a_script() -> None:
    done = run(BASH, "-n", SCRIPT)
    assert done.returncode == 0, done.stderr
