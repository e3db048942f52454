"""examples/prove_it.py finds its plan equal to the plain model, and notices where it is not."""

import re

import pytest

from tests.examples.forked import run_forked
from tests.programs import ROOT, python

pytestmark = pytest.mark.everything

EXAMPLE = ROOT / "examples" / "prove_it.py"

# What later slices leave for an earlier one's K and V is lost.
FORGETFUL = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(EXAMPLE.parent)!r}]
import prove_it
from megatron_epp.runtime.kv_store import Store

add = Store.add_gradient
Store.add_gradient = lambda self, layer, document, k, v: add(self, layer, document, 0 * k, v)
if __name__ == "__main__":
    prove_it.main()
"""


def test_the_plan_is_equal_to_the_plain_model() -> None:
    done = python(EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the plan: 2 stages, 3 chunks")
    # Two embeddings, four layers of six weights, the last norm, the output layer; and the loss.
    assert "29 of 29 compared" in done.stdout
    worst = re.search(r"worst (\S+): equal \(to 1e-12\)", done.stdout)
    assert worst is not None and float(worst[1]) < 1e-12
    assert done.stdout.count("\n    0  ") == 14 and done.stdout.count("\n    1  ") == 15


def test_a_lost_gradient_is_noticed(tmp_path) -> None:
    program = tmp_path / "forgetful.py"
    program.write_text(FORGETFUL)
    done = run_forked(program)
    assert done.status != 0
    assert "NOT equal" in done.output
