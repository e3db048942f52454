"""The set-up finds a Python 3.12 or says so in one line, and returns at once when it is done."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import BASH, ROOT, Done, python, run, stand_in


def set_up(tmp_path: Path, *flags: str, **environment: str) -> Done:
    """Runs setup_env.sh where PATH, pyenv and uv lead nowhere, unless ``environment`` says more."""
    nowhere = {"PATH": "", "HOME": str(tmp_path / "home"), "EPP_VENV": str(tmp_path / "venv")}
    script = ROOT / "scripts" / "setup_env.sh"
    return run(BASH, script, *flags, only=nowhere | environment)


def ready(venv: Path, text: str) -> None:
    """An environment that the set-up takes for its own work."""
    stand_in(venv / "bin" / "python", "exit 0")
    (venv / ".epp-installed").write_text(text)


def requirements(gpu: bool = False) -> str:
    names = ("requirements", "requirements-te", *["requirements-gpu"] * gpu)
    return "\n".join((ROOT / f"{name}.txt").read_text().rstrip("\n") for name in names)


@pytest.mark.parametrize("another", [False, True])
def test_no_python_is_one_line(tmp_path: Path, another: bool) -> None:
    """A python3 on PATH that is not 3.12 (the check, run in it, fails) is passed over."""
    if another:
        stand_in(tmp_path / "bin" / "python3", "exit 1")
    done = set_up(tmp_path, PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    assert done.stderr == (
        "setup_env: no Python 3.12 found on PATH, among pyenv's versions or through uv; "
        "install one (for instance: uv python install 3.12)\n"
    )
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("place", "environment"),
    [
        ("bin/python3.12", {"PATH": "bin"}),
        ("bin/python", {"PATH": "bin"}),
        ("home/.pyenv/versions/3.12.7/bin/python", {}),
        ("elsewhere/versions/3.12.1/bin/python", {"PYENV_ROOT": "elsewhere"}),
    ],
)
def test_every_place_is_searched(tmp_path: Path, place: str, environment: dict[str, str]) -> None:
    # Passes for a 3.12, and stops where the environment would be made.
    python = stand_in(tmp_path / place, '[[ $1 == -c ]] && exit 0; echo "$*" >&2; exit 7')
    done = set_up(tmp_path, **{name: str(tmp_path / path) for name, path in environment.items()})
    assert done.returncode == 7
    assert done.stderr == (
        f"setup_env: making {tmp_path}/venv with {python}\n-m venv {tmp_path}/venv\n"
    )


def test_a_foreign_environment_is_left_alone(tmp_path: Path) -> None:
    stand_in(tmp_path / "venv" / "bin" / "python", "exit 1")
    done = set_up(tmp_path)
    assert done.returncode == 2
    assert "holds another Python than 3.12; remove it, or name another place in EPP_VENV" in (
        done.stderr
    )


def test_the_second_run_is_quick(tmp_path: Path) -> None:
    """It starts nothing at all."""
    ready(tmp_path / "venv", requirements())
    called = tmp_path / "called"
    stand_in(tmp_path / "venv" / "bin" / "python", f'echo "$*" >> "{called}"')
    for name in ("python3", "pip", "uv"):
        stand_in(tmp_path / "bin" / name, f'echo "{name} $*" >> "{called}"')
    done = set_up(tmp_path, PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not called.exists()


@pytest.mark.parametrize(
    ("installed", "flags", "again"),
    [
        (requirements(gpu=True), ["--gpu"], False),
        (requirements(), ["--gpu"], True),
        (requirements().replace("torch==", "torch=="[::-1]), [], True),
    ],
)
def test_what_is_missing_is_installed(
    tmp_path: Path, installed: str, flags: list[str], again: bool
) -> None:
    ready(tmp_path / "venv", installed)
    toolkit(tmp_path, "13.0")
    done = set_up(tmp_path, *flags, CUDA_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert ("installing requirements.txt" in done.stderr) == again
    assert ("compiling Transformer Engine" in done.stderr) == (again and bool(flags))
    if again:
        assert (tmp_path / "venv" / ".epp-installed").read_text() == requirements(bool(flags))


def toolkit(home: Path, version: str) -> None:
    says = f"Cuda compilation tools, release {version}, V{version}.48"
    stand_in(home / "bin" / "nvcc", f"echo '{says}'")


@pytest.mark.parametrize(
    ("driver", "cuda", "says"),
    [
        ("570.86.15", "13.0", "NVIDIA driver 570.86.15: torch for CUDA 13 needs 580 or newer"),
        ("580.65.06", "12.8", "holds CUDA 12.8; Transformer Engine for this torch needs 13"),
        ("580.65.06", "13.1", None),
        (None, "13.0", None),  # an image is built where no GPU is
    ],
)
def test_a_driver_or_toolkit_that_will_not_do_is_refused_before_anything_is_fetched(
    tmp_path: Path, driver: str | None, cuda: str, says: str | None
) -> None:
    ready(tmp_path / "venv", "nothing")
    if driver is not None:
        stand_in(tmp_path / "bin" / "nvidia-smi", f"echo {driver}; echo {driver}")
    toolkit(tmp_path / "cuda", cuda)
    where = {"PATH": str(tmp_path / "bin"), "CUDA_HOME": str(tmp_path / "cuda")}
    done = set_up(tmp_path, "--gpu", **where)
    if says is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    # Who wants no GPU is not asked.
    assert set_up(tmp_path, **where).returncode == 0


def test_an_unfinished_installation_is_not_taken_for_done(tmp_path: Path) -> None:
    stand_in(tmp_path / "venv" / "bin" / "python", '[[ $* == *"pip install"* ]] && exit 5; exit 0')
    assert set_up(tmp_path).returncode == 5
    assert not (tmp_path / "venv" / ".epp-installed").exists()


def test_the_environment_of_these_tests_is_the_pinned_one() -> None:
    from importlib.metadata import distributions

    beside = [*sys.path, str(Path(sys.prefix) / "te_on_cpu")]
    found = {one.name.replace("_", "-"): one.version for one in distributions(path=beside)}
    for name, version in re.findall(r"^([\w\-]+)==([\w.]+)", requirements(), re.M):
        assert (name, found.get(name)) == (name, version)


@pytest.mark.everything
def test_missing_gpus_are_counted(tmp_path: Path) -> None:
    """The last lines say how many tests a host without a GPU leaves out."""
    marked = tmp_path / "test_marked.py"
    marked.write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_a(): pass\n"
        "@pytest.mark.gpu\ndef test_b(): pass\n"
        "def test_c(): pass\n"
        "def test_d(): pytest.skip('for another reason')\n"
    )
    config = ["-c", ROOT / "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = python("-m", "pytest", *config, marked, CUDA_VISIBLE_DEVICES="")
    assert "2 tests skipped for lack of a GPU" in done.stdout
    assert "1 passed, 3 skipped" in done.stdout


SHELL_SCRIPTS = [
    "setup_env.sh", "test.sh", "test_all.sh", "tiers.sh", "check.sh", "ranges.sh"
]  # fmt: skip


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_scripts_parse_and_ci_runs_the_readmes_command(script: str) -> None:
    subprocess.run([BASH, "-n", ROOT / "scripts" / script], check=True)
    assert (
        "&& bash scripts/test.sh && exec bash scripts/test_all.sh --rest"
        in (ROOT / ".ci" / "run").read_text()
    )
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
