"""MEGATRON_EPP=1 and install_schedule(): one line that names attach."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import megatron_epp
from megatron_epp.autoload import INSTEAD

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"MEGATRON_EPP": "0"}, ""),
        ({"MEGATRON_EPP": "1", "RANK": "1"}, ""),
        (
            {"MEGATRON_EPP": "1"},
            f"megatron_epp: MEGATRON_EPP=1: {INSTEAD}; Megatron's own schedule runs\n",
        ),
    ],
)
def test_the_variable_says_one_line_and_starts_nothing(variables, said) -> None:
    known = {k: v for k, v in os.environ.items() if k not in ("MEGATRON_EPP", "RANK")}
    script = "import sys; from megatron_epp.autoload import start; start(); print(len([*filter("
    script += "lambda name: name in ('torch', 'megatron.core'), sys.modules)]))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=known | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("0\n", said)
    assert "attach(model, adapter)" in INSTEAD


def test_the_entry_point_of_torch_is_the_only_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {
        "torch.backends": {"megatron_epp": "megatron_epp.autoload:start"}
    }
    value = project["entry-points"]["torch.backends"]["megatron_epp"]
    EntryPoint("megatron_epp", value, "torch.backends").load()()


def test_the_former_function_names_attach() -> None:
    with pytest.raises(ValueError, match=r"^install_schedule\(\): scheduling mode was removed"):
        megatron_epp.install_schedule(reorder=False)
