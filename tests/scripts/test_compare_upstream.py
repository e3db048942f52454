"""The comparison with upstream sees a difference of one bit; the runs need a checkout."""

import runpy
from pathlib import Path

import torch

from tests.programs import python

SCRIPT = Path(__file__).parents[2] / "scripts" / "upstream" / "compare_upstream.py"


def test_one_bit_and_a_missing_tensor_are_differences():
    differing = runpy.run_path(str(SCRIPT))["differing"]
    one = torch.ones(3)
    next_to_one = torch.nextafter(one, torch.tensor(2.0))
    assert differing({"a": one, "b": one}, {"a": one.clone(), "b": one}) == []
    assert differing({"a": one, "b": one}, {"a": next_to_one, "b": one}) == ["a"]
    assert differing({"a": one, "b": one}, {"b": one}) == ["a"]


def test_a_folder_without_the_script_is_refused_in_one_line(tmp_path):
    done = python(SCRIPT, "--megatron", tmp_path)
    assert done.returncode == 2
    assert f"--megatron {tmp_path}: no pretrain_gpt.py there" in done.stderr
