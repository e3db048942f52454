"""Importing a name costs that name."""

import subprocess
import sys

import pytest

import megatron_epp.planner
from megatron_epp.planner import MODULE_OF

HEAVY = "{'numba', 'highspy', 'megatron_epp.planner.epp.search'}"


@pytest.mark.parametrize(
    "line",
    [
        "import megatron_epp.corpus, megatron_epp.corpus.lengths",
        "import megatron_epp.planner.options",
        "from megatron_epp.planner import Options, parse_levers",
    ],
)
def test_options_and_corpora_need_neither_compiler_nor_solver(line: str) -> None:
    code = f"import sys; {line}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_name_is_there_when_it_is_asked_for() -> None:
    for name in MODULE_OF:
        assert getattr(megatron_epp.planner, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'plann_step'"):
        megatron_epp.planner.plann_step  # noqa: B018
