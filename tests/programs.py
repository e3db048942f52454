"""Programs for tests: commands whose output is captured, stand-ins, scripts taken as modules."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from tests.waiting import LAST_RESORT_SECONDS

ROOT = Path(__file__).parents[1]
BASH = shutil.which("bash") or "bash"
Done = subprocess.CompletedProcess[str]


def run(
    *words: object,
    stdin: str | None = None,
    cwd: Path = ROOT,
    only: Mapping[str, str] | None = None,
    seconds: float = LAST_RESORT_SECONDS,
    **variables: str,
) -> Done:
    """The command in this environment, or in ``only``, with ``variables`` besides."""
    environment = {**(os.environ if only is None else only), **variables}
    command = [str(word) for word in words]
    return subprocess.run(
        command, input=stdin, cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip


def python(*words: object, **how) -> Done:
    return run(sys.executable, *words, **how)


def stand_in(path: Path, script: str) -> Path:
    """An executable at ``path`` that runs ``script`` in bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{script}\n")
    path.chmod(0o755)
    return path


def loaded(path: Path) -> ModuleType:
    """A script of this project as a module, anew with every call."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def megatron_copy(folder: Path) -> Path:
    """``folder`` with a copy of the installed Megatron, as a checkout has it."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    (installed, *_) = spec.submodule_search_locations
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("core", "training"):
        shutil.copytree(Path(installed, part), folder / "megatron" / part, ignore=ignored)
    return folder
