"""examples/rl_loop.py: a loop in slices has the gradients of Megatron's own schedule."""

import re
from pathlib import Path

import pytest

from tests.examples.forked import run_forked

pytestmark = pytest.mark.everything

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


def test_slices_and_megatrons_own_schedule_agree() -> None:
    done = run_forked(EXAMPLE)
    assert done.status == 0, done.output
    worst = re.findall(r"stage \d: \d+ gradients, worst difference ([0-9.e+-]+)", done.output)
    assert len(worst) == 2 and max(map(float, worst)) < 1e-12
    assert done.output.count("equal (to 1e-12)") == 2
    (found,) = re.findall(r"4 micro-batches, (\d+) chunks", done.output)
    assert int(found) > 4  # the long answer was cut
    ((given, computed),) = re.findall(r"(\d+) tokens given, (\d+) computed", done.output)
    answers, prompts = 160 + 9 + 40 + 12 + 7 + 30 + 22 + 5 + 16 + 60, 4
    assert int(given) == answers + 10 * 32
    # The prompt's last token has another label in front of every answer.
    assert int(computed) == answers + 10 + (prompts - 1) * 31 + 31
    losses = re.findall(r"loss of prompt \d: (\S+) stock, (\S+) in slices", done.output)
    assert len(losses) == 4 and len({a for a, _ in losses}) == 4
