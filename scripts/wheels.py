#!/usr/bin/env python3
"""Builder of this checkout's wheel, and of Python environments in which to install it.

    scripts/wheels.py FOLDER     # into an empty folder; prints its path

The functions are also parts of ranges.sh, of scripts/upstream and of the tests.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = "pyproject.toml", "README.md", "LICENSE", "NOTICE", "megatron_epp"


def built(kind: str, source: Path, into: Path) -> Path:
    """Build ``kind`` (sdist, wheel) of ``source`` like ``python -m build --no-isolation``.

    Raises:
        RuntimeError: if setuptools fails; the message is its output.
    """
    program = f"from setuptools.build_meta import *; build_{kind}({str(into)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    (found,) = into.iterdir()
    return found


def wheel_of_checkout(into: Path) -> Path:
    """Build the wheel from a copy, because setuptools would leave its build folder here."""
    with tempfile.TemporaryDirectory() as copy:
        for name in COPIED:
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, Path(copy, name))
        return built("wheel", Path(copy), into)


def lend(names: Iterable[str], folder: Path) -> Path:
    """Make ``folder`` with links to this Python's distributions ``names``; return it."""
    folder.mkdir()
    for path in {
        Path(found.locate_file(file.parts[0]))
        for found in map(metadata.distribution, names)
        for file in found.files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }:
        if path.exists():
            (folder / path.name).symlink_to(path)
    return folder


def environment(folder: Path, lent: Path) -> Path:
    """Make an environment in ``folder``, and return its Python.

    Packages in ``lent`` come after its own packages; its pip cannot change them.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n")
    return folder / "bin" / "python"


def pip(python: Path, *words: str | Path) -> None:
    """Run this Python's pip for ``python``.

    Raises:
        RuntimeError: if pip fails; the message is its output.
    """
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    done = subprocess.run([*command, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


if __name__ == "__main__":
    print(wheel_of_checkout(Path(sys.argv[1])))
