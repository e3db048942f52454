"""What is published: a source distribution, the wheel that is built from it, and a Python that has
the wheel and what it says that it needs, outside of any checkout."""

import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_epp
from tests import programs

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import wheels  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = megatron_epp.__version__
# What stands in a checkout and in no distribution: what git ignores, mostly.
NOT_COPIED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "quickstart", "*.bin", "*.idx"
)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", ignore=NOT_COPIED)
    (folder / "made").mkdir()
    made = wheels.built("sdist", folder / "checkout", folder / "made")
    with tarfile.open(made) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"megatron_epp-{VERSION}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory) -> Path:
    return wheels.built("wheel", sdist, tmp_path_factory.mktemp("wheel"))


def test_the_sdist_has_what_users_of_a_wheel_lack(sdist: Path) -> None:
    """README, "After pip install", says that these are there."""
    for name in (
        "examples/pretrain_gpt_epp.sh",
        "examples/slurm/pretrain_llama_7b.sbatch",
        "scripts/gpu/gpu_day.sh",
        "scripts/prepare_corpus.py",
        "scripts/upstream/check_upstream.py",
        "requirements.txt",
        "docs/guides/external_loops.md",
        "tests/golden/00-wlb.plan",
        "CITATION.cff",
    ):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_the_wheel_has_all_of_the_package_its_licence_and_nothing_else(wheel: Path) -> None:
    folder = ROOT / "megatron_epp"
    ours = {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"megatron_epp-{VERSION}.dist-info"
        text = archive.read(f"{about}/METADATA").decode()
        entries = archive.read(f"{about}/entry_points.txt").decode()
        for name in ("LICENSE", "NOTICE"):
            assert archive.read(f"{about}/licenses/{name}") == (ROOT / name).read_bytes()
    assert {name for name in names if not name.startswith(about)} == ours
    assert "License-Expression: Apache-2.0\n" in text
    assert f"Version: {VERSION}\n" in text
    for group, named in PROJECT["entry-points"].items():  # what MEGATRON_EPP=1 rests on
        assert f"[{group}]\n" in entries
        assert all(f"{name} = {value}\n" in entries for name, value in named.items())


def test_the_version_is_said_once_and_told_everywhere() -> None:
    assert "version" in PROJECT["dynamic"]
    assert re.search(rf"^version: {VERSION}$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert re.search(rf"^## {VERSION}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory) -> Path:
    """A Python with the wheel, installed by pip, and of these tests' packages only those that
    planning needs; pip may fetch nothing."""
    folder = tmp_path_factory.mktemp("outside")
    lent = wheels.lend(("numpy", "numba", "llvmlite", "highspy", "tqdm"), folder / "lent")
    wheels.pip(wheels.environment(folder / "env", lent), "install", "--no-index", wheel)
    return folder


def run(outside: Path, *words: str) -> programs.Done:
    """The installed command. Not compiled: that takes longer than all else here."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    known |= {"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1"}
    command = outside / "env" / "bin" / "megatron-epp"
    return programs.run(command, *words, cwd=outside, only=known)


@pytest.mark.everything
def test_the_installed_command_plans_compares_and_draws(outside: Path) -> None:
    (outside / "lengths.txt").write_text("\n".join(map(str, (9000, 1500, 900, 300, 12, 4000))))
    batch = ("--lengths", "lengths.txt", "--model", "llama3-8b", "--pp", "2", "--tp", "8")
    batch += ("--placement", "even")  # uncompiled, a choice of the placement takes minutes
    done = run(outside, "compare", *batch, "--device", "h100-80g")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^epp +[\d.]+ ", done.stdout, re.M), done.stdout
    assert run(outside, "plan", *batch, "--device", "h100-80g", "-o", "x.plan").returncode == 0
    for picture in ("x.svg", "x.html"):
        done = run(outside, "draw", "x.plan", "-o", picture)
        assert done.returncode == 0, done.stderr
        assert (outside / picture).stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--version"], f"megatron_epp {VERSION}\n"),
        (["draw", "x.plan", "-o", "x.png"], "pip install '.[plots]' in a checkout"),
        (["certify", "--pp", "2"], "pip install '.[train]' in a checkout"),
    ],
)
def test_what_is_not_there_is_named_with_the_extra_that_brings_it(
    outside: Path, words: list[str], told: str
) -> None:
    (outside / "x.plan").write_text((ROOT / "tests" / "golden" / "31-wlb.plan").read_text())
    done = run(outside, *words)
    assert told in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("\n") == 1


def test_no_page_installs_a_name_that_is_not_published() -> None:
    """Whatever an index has under it would be somebody else's."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder, suffixes in (
        ("docs", {".md"}),
        ("examples", {".sh", ".py", ".sbatch", ".yaml", ""}),
        ("megatron_epp", {".py"}),
        ("scripts", {".py", ".sh", ".md"}),
    ):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        pages += [path for path in files if path.suffix in suffixes]
    asks = re.compile(r"pip3? install(?:\s+-\S+)*\s+['\"]?megatron-epp\b")
    assert [str(path) for path in pages if asks.search(path.read_text())] == []
    assert asks.search("python -m pip install --quiet megatron-epp")
    assert asks.search("pip install 'megatron-epp[train]'")


def test_the_ranges_hold_what_the_requirements_pin() -> None:
    """Every pin is allowed, and nothing is allowed that no pin is tested with."""
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["train"], *extras["plots"]]
    asked += [*extras["docs"], *extras["dev"]]
    ranges = {one.name: one for one in map(Requirement, asked) if one.name != "megatron-epp"}
    text = (ROOT / "requirements.txt").read_text()
    pins = dict(re.findall(r"^([\w\-]+)==([\w.]+)", text, re.M))
    assert set(ranges) == set(pins)
    for name, pin in pins.items():
        assert ranges[name].specifier.contains(pin), (name, pin)
    gpu = Requirement(extras["gpu"][1])
    (pin,) = re.findall(
        r"^transformer-engine\[core_cu13,pytorch\]==([\w.]+)",
        (ROOT / "requirements-gpu.txt").read_text(),
        re.M,
    )
    assert gpu.name == "transformer-engine" and gpu.specifier.contains(pin)
