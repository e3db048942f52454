"""Importing a name costs that name."""

import subprocess
import sys

import pytest

HEAVY = "{'numba', 'highspy', 'megatron_epp.planner.epp.search'}"


@pytest.mark.parametrize(
    "line",
    [
        "import megatron_epp.corpus, megatron_epp.corpus.lengths",
        "import megatron_epp.planner.options",
    ],
)
def test_options_and_corpora_need_neither_compiler_nor_solver(line: str) -> None:
    code = f"import sys; {line}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
