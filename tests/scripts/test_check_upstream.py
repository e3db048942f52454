"""Which patch points hold in a checkout, the installed one and others, from its sources."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import checkout as checkout_module
import pytest
from checkout import Checkout, look

from megatron_epp.mcore.patching import patch_points
from megatron_epp.mcore.patching.releases import NEWEST, RELEASES, STABLE, release_of
from tests.forks import Ended
from tests.programs import ROOT, megatron_copy, python

pytestmark = pytest.mark.everything
SCRIPT = ROOT / "scripts" / "upstream" / "check_upstream.py"


def installed() -> Path:
    spec = importlib.util.find_spec("megatron")
    return Path(next(iter(spec.submodule_search_locations))).parent


@pytest.fixture
def check(monkeypatch, capsys):
    """The script's main, in this process: it imports torch, which takes seconds."""
    main = runpy.run_path(str(SCRIPT))["main"]

    def run(checkout: Path, *words: str) -> Ended:
        checkout_module._tree.cache_clear()
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--megatron", str(checkout), *words])
        return Ended(main(), *capsys.readouterr())

    return run


@pytest.fixture
def tree(tmp_path) -> Path:
    return megatron_copy(tmp_path)


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_installed_one_holds() -> None:
    """As from the shell."""
    done = python(SCRIPT, "--megatron", installed())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all {len(patch_points.ALL_PATCH_POINTS)} patch points hold: {STABLE}" in done.stdout


def test_its_sources_are_those_that_run() -> None:
    """What is read from files is what ``inspect`` says of the functions that were imported."""
    checkout = Checkout(installed())
    for patch_point in patch_points.ALL_PATCH_POINTS:
        for name in (patch_point.target, *patch_point.relies_on):
            assert checkout.source(name) == patch_points._source(name) != ""
    assert checkout.version == NEWEST


def test_a_drift_a_missing_function_and_a_missing_name_are_shown(tree, check) -> None:
    """In what a patch point relies on; a function that is gone; a name that the package imports."""
    megatron = tree / "megatron"
    jit = "def set_jit_fusion_options("
    replace(megatron / "training" / "initialize.py", jit, f"{jit}x, ")
    layers = megatron / "core" / "tensor_parallel" / "layers.py"
    replace(layers, "class RowParallelLinear(", "class RowParallelMatrix(")
    rerun = megatron / "core" / "rerun_state_machine.py"
    replace(rerun, "def get_rerun_state_machine(", "def the_rerun_state_machine(")
    done = check(tree)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    states = {line[2:].split("  ")[0]: line.split("  ")[-1].strip() for line in lines[1:17]}
    drifted = {name for name, state in states.items() if state == "drifted"}
    assert drifted == {"fusion warm-up", "row linear"}
    assert any(line.startswith(f"+{jit}x, ") for line in lines)
    assert any(line.startswith(f"-{jit}") for line in lines)
    gone = "megatron.core.tensor_parallel.layers.RowParallelLinear._forward_impl is gone"
    assert gone in lines
    name = "megatron.core.rerun_state_machine.get_rerun_state_machine"
    assert f"  gone: {name}, which megatron_epp imports" in lines
    assert lines[-1].startswith("2 of 16 patch points drifted, 1 names are gone")
    assert check(tree, "--quiet").stdout.count("\n+") == 0


def test_patches_count_as_holding(tree) -> None:
    patches = sorted((ROOT / "patches").glob("*.patch"))
    subprocess.run(["git", "apply", *map(str, patches)], cwd=tree, check=True)
    findings = look(patch_points.ALL_PATCH_POINTS, Checkout(tree), Checkout(installed()))
    assert all(one.holds for one in findings)
    assert [one.patch_point.name for one in findings if one.patched] == [
        patch_point.name
        for patch_point in patch_points.ALL_PATCH_POINTS
        if patch_point.when != "cpu host"
    ]


def test_what_is_no_checkout_is_refused_in_one_line(tmp_path, check) -> None:
    done = check(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"check_upstream: {tmp_path}") and done.stderr.count("\n") == 1


def test_every_release_names_every_patch_point() -> None:
    for release in RELEASES:
        assert set(release.fingerprints) == {
            patch_point.name for patch_point in patch_points.ALL_PATCH_POINTS
        }
        for version in release.versions:
            assert release_of(version) is release_of(f"{version}+d98e8a64") is release
