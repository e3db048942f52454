"""The licence is in what is installed, and NOTICE names all that is quoted of Megatron-LM."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_licence_is_apaches_own_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_licence_and_notice_are_in_the_metadata_of_a_wheel(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "megatron_epp").mkdir()
    build = (
        "from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare;"
        "print(prepare('.'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    folder = tmp_path / done.stdout.splitlines()[-1]
    metadata = (folder / "METADATA").read_text()
    assert "License-Expression: Apache-2.0\n" in metadata
    for name in ("LICENSE", "NOTICE"):
        assert f"License-File: {name}\n" in metadata
        assert (folder / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_notice_names_the_files_that_patches_quote() -> None:
    quoted = {
        name
        for patch in (ROOT / "patches").glob("*.patch")
        for name in re.findall(r"^--- a/(\S+)$", patch.read_text(), re.MULTILINE)
    }
    named = re.findall(r"^    (megatron/\S+)$", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    assert quoted and sorted(quoted) == named
