"""The seams as patches: they apply to the installed Megatron, and the seams see that they did."""

import os
from pathlib import Path

import pytest

from tests.programs import ROOT, Done, megatron_copy, python, run

pytestmark = pytest.mark.everything

PATCHES = sorted((ROOT / "patches").glob("*.patch"))
# Megatron's packages in the order of this test: the patched one before the installed one.
LOOK = """
from megatron_epp.mcore.patching import cpu_host, patch_points
assert cpu_host.install_cpu_host()
import megatron.core
assert megatron.core.__file__.startswith({patched!r}), megatron.core.__file__
patch_points.check_patch_points()
patch_points.install(patch_points.ALL_PATCH_POINTS)
for point in patch_points.ALL_PATCH_POINTS:
    print(point.name, "|", point.when, "|", patch_points.is_patched(point))

from megatron.core.pipeline_parallel import schedules
from megatron.training import training

def factory(original):
    assert original is schedules.stock_forward_backward_func
    return lambda **asked: sorted(asked)

patch_points.apply_schedule_patch(factory)
assert training.get_forward_backward_func is schedules.get_forward_backward_func
assert training.get_forward_backward_func() == ["pp_size", "schedule_pg_collection", "vp_size"]
schedules.choose_schedule(None)
assert schedules.get_forward_backward_func(1, None) is schedules.forward_backward_no_pipelining
"""


def git_apply(tree: Path, *words: str) -> Done:
    return run("git", "apply", *words, cwd=tree)


def test_there_are_patches_and_the_readme_names_each():
    assert PATCHES
    readme = (ROOT / "patches" / "README.md").read_text()
    assert [patch.stem for patch in PATCHES if patch.stem not in readme] == []


def test_the_patches_apply_and_where_they_are_applied_nothing_is_replaced(tmp_path):
    """To a copy of the installed Megatron, as a checkout has it: alone, together, and not twice."""
    tree = megatron_copy(tmp_path)
    for patch in PATCHES:
        done = git_apply(tree, "--check", str(patch))
        assert done.returncode == 0, done.stderr
    assert git_apply(tree, *map(str, PATCHES)).returncode == 0
    for patch in PATCHES:
        assert git_apply(tree, "--check", str(patch)).returncode != 0
    path = f"{tree}{os.pathsep}{ROOT}"
    how = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = python("-c", LOOK.format(patched=str(tree)), cwd=tree, **how)
    assert done.returncode == 0, done.stderr
    patch_points = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert patch_points
    for name, when, patched in patch_points:
        assert patched == str(when != "cpu host"), name
