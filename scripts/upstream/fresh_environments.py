#!/usr/bin/env python3
# ruff: noqa: E402  (run from anywhere: what stands beside this is found first)
"""Tests of MEGATRON_EPP=1 alone, in environments with this package and a Megatron from pip.

    scripts/upstream/fresh_environments.py                            # every release, by torchrun
    scripts/upstream/fresh_environments.py --megatron 0.18.2 --ray    # in actors of Ray, too
    scripts/upstream/fresh_environments.py --torch 2.8.0              # not this environment's torch

For each release of megatron-core, the script makes an environment outside of the checkout. pip
installs the wheel of this checkout (with [train] if the release allows it), the release, and the
dependencies of both. Only torch comes from this environment, or is downloaded once if --torch names
another release. The loop is tests/mcore/loops/strangers_loop.py: two processes with one stage each,
float64, five calls with Megatron's own schedule, and five with the schedule that the variable
installs. Finally, a function that this package needs gets another name in the files of this
Megatron. The script fails if a gradient differs by more than 1e-12, a call ran without a plan, or
the package prints anything but one line.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "upstream")]

import wheels
from megatron_matrix import MEGATRONS, TOLERANCE

LOOP = ROOT / "tests" / "mcore" / "loops" / "strangers_loop.py"
COPIED = LOOP, ROOT / "examples" / "rl_loop.py", Path(__file__).with_name("ray_actors.py")
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", LOOP.name
RENAMED = "check_first_val_step"  # a function of Megatron that plans of micro-batches need
PLANNED = 3  # of five calls: two show that micro-batches are read rightly
SAID = ("WARNING:megatron_epp", "megatron_epp", "Megatron's own schedule")
SENDER = re.compile(r"(\x1b\[\d+m)?\(\w+ pid=\d+\)(\x1b\[\d+m)? ")  # who speaks, as Ray says it

Answers = Sequence[Mapping]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", nargs="+", default=MEGATRONS, metavar="RELEASE")
    parser.add_argument("--torch", metavar="RELEASE", help="to be fetched (gigabytes)")
    parser.add_argument("--ray", action="store_true", help="run the loop in actors of Ray, too")
    given = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory(prefix="fresh") as name:
        folder = Path(name)
        if given.torch:
            lent = folder / "lent"
            wheels.pip(Path(sys.executable), "install", "-q", "--no-cache-dir", "--target", lent,
                       f"torch=={given.torch}", "setuptools")  # fmt: skip
        else:
            lent = wheels.lend(wheels.with_what_it_needs("torch"), folder / "lent")
        (folder / "wheel").mkdir()
        wheel = wheels.wheel_of_checkout(folder / "wheel")
        for release in given.megatron:
            for line, right in tried(release, wheel, folder / release, lent, given.ray):
                fine &= right
                print(line if right else f"WRONG: {line}", flush=True)
            shutil.rmtree(folder / release)
    return 0 if fine else 1


def tried(
    release: str, wheel: Path, folder: Path, lent: Path, ray: bool
) -> Iterator[tuple[str, bool]]:
    """Yield (line of output, whether it is as expected) for each run of the loop with a release."""
    python = wheels.environment(folder, lent)
    asked = [f"{wheel}{extras(release)}", f"megatron-core=={release}", *(["ray"] if ray else [])]
    wheels.pip(python, "install", "-q", *asked)
    (folder / "loop").mkdir()
    for file in COPIED:
        shutil.copy(file, folder / "loop")
    versions = installed(python)
    assert versions["megatron-core"] == release
    yield f"megatron-core {release}: {', '.join(map(' '.join, versions.items()))}", True
    on = {"MEGATRON_EPP": "1"}
    yield judged("torchrun", folder, *run(python, folder / "loop", TORCHRUN, on), release)
    if ray:
        actors = run(python, folder / "loop", ("ray_actors.py",), on)
        yield judged("Ray, exported", folder, *actors, release)
        actors = run(python, folder / "loop", ("ray_actors.py", "MEGATRON_EPP=1"), {})
        yield judged("Ray, runtime_env", folder, *actors, release)
    with renamed(folder):
        answers, said = run(python, folder / "loop", TORCHRUN, on)
    alone = len(said) == 1 and "own schedule runs" in said[0] and RENAMED in said[0]
    yield (
        f"  a function renamed: {by_plans(answers)} calls by plans, worst {worst(answers):.1e}, "
        f"said: {said}",
        alone and worst(answers) == 0 and by_plans(answers) == 0,
    )


def judged(
    launcher: str, folder: Path, answers: Answers, said: Sequence[str], release: str
) -> tuple[str, bool]:
    """Return a line on a run, and whether the run is correct.

    All modules must come from ``folder``, all calls must run by plans with Megatron's gradients,
    and the output must name the mode and release.
    """
    banner = f"level 0, megatron-core {release}"
    # The loop's second half pads otherwise than slime does, which one line tells.
    said_right = len(said) == 2 and banner in said[0] and "slime lays out otherwise" in said[1]
    there = all(Path(place).is_relative_to(folder) for one in answers for place in one["places"])
    right = there and said_right and by_plans(answers) == PLANNED and worst(answers) <= TOLERANCE
    line = f"  {launcher}: {by_plans(answers)} calls by plans, worst {worst(answers):.1e}"
    return line if right else f"{line}, from {answers[0]['places']}, said: {said}", right


def worst(answers: Answers) -> float:
    return max(answer[loop]["worst"] for answer in answers for loop in ("as it says", "otherwise"))


def by_plans(answers: Answers) -> int:
    (count,) = {answer["calls"] for answer in answers}
    return count


def extras(release: str) -> str:
    """Return the extras of this package's wheel that allow this release of megatron-core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = map(Requirement, project["optional-dependencies"]["train"])
    (megatron,) = (one for one in asked if one.name == "megatron-core")
    return "[train]" if megatron.specifier.contains(release) else ""


def installed(python: Path) -> dict[str, str]:
    names = ("megatron-epp", "megatron-core", "torch", "numpy", "numba", "highspy")
    program = f"import importlib.metadata as m; print(*map(m.version, {names}))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def run(
    python: str | Path, loop: Path, words: Sequence[str], variables: Mapping[str, str]
) -> tuple[list[Mapping], list[str]]:
    """Return the answers of both ranks of the loop, and the lines that megatron_epp printed.

    ``loop`` is the working folder.

    Raises:
        RuntimeError: if the loop fails; the message contains all output.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name != "MEGATRON_EPP"
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [str(python), *words, folder],
            cwd=loop,
            env=kept | {"OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        answers = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("answers.*"))]
    if done.returncode or len(answers) != 2:
        raise RuntimeError(f"{loop}: the loop ended with status {done.returncode}\n{done.stdout}")
    lines = (SENDER.sub("", line, 1) for line in done.stdout.splitlines())
    return answers, [line for line in lines if line.startswith(SAID)]


@contextmanager
def renamed(folder: Path) -> Iterator[None]:
    """Rename a function in all files of the Megatron in ``folder`` inside the ``with`` block."""
    texts = {}
    for file in folder.glob("lib/python3*/site-packages/megatron/core/**/*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(rf"\b{RENAMED}\b", text):
            texts[file] = text
            file.write_text(re.sub(rf"\b{RENAMED}\b", "is_first", text), encoding="utf-8")
    assert texts, f"{folder}: nothing there has the name {RENAMED}"
    yield
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
