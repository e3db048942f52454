"""A new kind of op that costs and frees something: the files that it touches, and who says which of
them was forgotten (CONTRIBUTING, "Add a kind of op")."""

import re
from pathlib import Path

import pytest

from megatron_epp.ir import op
from tests.ir.edited_copy import run_with

# L, in the place of W: takes half as long again and twice the workspace, and frees what I left. By
# file what is written and before which line. Besides these, mcore/model/stage.py computes it.
LATE = {
    "ir/op.py": [
        ('    SEND = "SEND"\n', '    LATE = "L"\n'),
        ("OF_HEAD = (", "MAKE_GRADIENTS = (*MAKE_GRADIENTS, Kind.LATE)\n"),
    ],
    "ir/rules.py": [
        (
            "\n\ndef held(",
            """
RULES = {**RULES, Kind.LATE: RULES[Kind.WEIGHT]}
CHUNK_OPS = (*CHUNK_OPS, (Kind.FORWARD, Kind.HEAD, Kind.INPUT, Kind.LATE, Kind.HEAD_WEIGHT))
""",
        )
    ],
    "ir/program/sequence.py": [
        ("# Work of an op on a stage's vocabulary rows", "FORWARDS = {**FORWARDS, Kind.LATE: 2}\n")
    ],
    "cost/seconds.py": [
        (
            "        every = {**result, **self.ends.head_seconds()}",
            "        result[Kind.LATE] = 1.5 * result[Kind.WEIGHT]\n",
        ),
        (
            "        return {**result, **self.ends.head_comm_seconds()}",
            "        result[Kind.LATE] = 1.5 * result[Kind.WEIGHT]\n",
        ),
    ],
    "cost/chunk_tables.py": [
        (
            "        return of_layers | dict(self.ends.head_workspace_bytes(self.loads))\n",
            "        if Kind.WEIGHT in of_layers:  # not where no search splits a backward\n"
            "            of_layers[Kind.LATE] = 2 * of_layers[Kind.WEIGHT]\n",
        )
    ],
    "sim/unit_table.py": [("\n\ndef unit_table", "UNITS[Kind.LATE] = 1.5\n")],
    "runtime/executor.py": [
        (
            "            Kind.SEND: self._send,\n",
            "            Kind.LATE: lambda op: self.compute.late(op.chunk),\n",
        )
    ],
    "show/colours.py": [
        ("\nINK = ", '\nFAMILIES[Kind.LATE] = Family("late", 90, 0.3, ";", "37", "rail_idle")\n')
    ],
}
USE = """
from unittest.mock import Mock
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Kind, Op, Plan, PlanError, check, lower
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import planner_of
from megatron_epp.runtime.executor import Executor
from megatron_epp.show.page import to_html
from megatron_epp.show.text import text_gantt
from megatron_epp.show.timeline import timeline_of
from megatron_epp.show.trace import to_trace
from megatron_epp.sim.play import play
from megatron_epp.sim.unit_table import unit_table

TEXT = '''plan v1
replica 0 of 1
documents 8000
layers 16 16
chunk 0: 0[0:5000]
chunk 1: 0[5000:8000]
recompute 0: 16k 16k
recompute 1: 16k 16k
stage 0: F0 F1 I1 L1 I0 L0
stage 1: F0 F1 I1 W1 I0 L0
'''
plan = Plan.parse(TEXT)
assert str(plan) == TEXT
check(plan)
assert not plan.forward_only

def refused(old, new):
    try:
        check(Plan.parse(TEXT.replace(old, new)))
    except PlanError as error:
        return str(error).split("\\n")[0]

assert refused("I1 L1 I0 L0", "I1 I0 L0") == (
    "stage 0: chunk 1 has ops F I; expected F B or F I W or F I L")
assert refused("I1 L1", "L1 I1").startswith("stage 0 at L1: lacks I1 of stage 0 (what its I left")
cost = named_cost("gpt-7b", "a100-80g", pp=2, cp=8)
plain = Plan.parse(TEXT.replace("L", "W"))
late, whole = play(plan, cost.table(plan)), play(plain, cost.table(plain))

def seconds(played, op):
    return next(r.seconds for r in played.records if r.stage == 0 and r.op == Op.parse(op))

assert abs(seconds(late, "L1") - 1.5 * seconds(whole, "W1")) < 1e-9
assert set(late.left_bytes) == {0.0}, late.left_bytes
table = cost.table(plan)
assert (table.workspace_bytes[Kind.LATE] == 2 * table.workspace_bytes[Kind.WEIGHT]).all()
assert [str(op) for op in lower(plan)[0] if isinstance(op, Op)] == "F0 F1 I1 L1 I0 L0".split()
from megatron_epp.ir.program import sequence
assert Kind.LATE in sequence.FORWARDS, "sequence: L has no work"
pictured = play(plan, unit_table(plan))
assert seconds(pictured, "L1") == 1.5
timeline = timeline_of(pictured)
assert "L0" in text_gantt(timeline, 120) and '"name":"L0"' in to_trace(timeline)
assert "late" in to_html(timeline)
compute = Mock()
executor = Executor((), compute, *[None] * 4, Mock())
executor._do[Kind.LATE](Op.parse("L1"))
assert set(executor._do) == set(Kind)
compute.late.assert_called_once_with(1)
found = planner_of("epp")([9000, 500, 300], cost, Options(effort=0))  # planners leave it alone
assert found.seconds == play(found.plan, cost.table(found.plan)).seconds
print("all of it")
"""


def test_it_touches_twelve_files_at_most(tmp_path: Path) -> None:
    assert len(LATE) + 1 <= 12
    done = run_with(LATE, USE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all of it" in done.stdout


@pytest.mark.parametrize(
    ("forgotten", "said"),
    [
        ("ir/rules.py", "stage 0: chunk 0 has ops F I L; expected F B or F I W"),
        ("ir/program/sequence.py", "sequence: L has no work"),
        ("cost/seconds.py", "KeyError: <Kind.LATE: 'L'>"),
        ("cost/chunk_tables.py", "Kind.LATE"),
        ("sim/unit_table.py", "KeyError: <Kind.LATE: 'L'>"),
        ("runtime/executor.py", "KeyError: <Kind.LATE: 'L'>"),
        ("show/colours.py", "KeyError: <Kind.LATE: 'L'>"),
    ],
)
def test_a_forgotten_place_is_named(tmp_path: Path, forgotten: str, said: str) -> None:
    edits = {name: changes for name, changes in LATE.items() if name != forgotten}
    done = run_with(edits, USE, tmp_path)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr[-2000:]


def test_the_docstring_names_the_places() -> None:
    """Those that every kind has; one that costs nothing is not in the cost model."""
    named = re.findall(r"\b(?:ir|sim|runtime|show)/[a-z_]+", op.Kind.__doc__ or "")
    assert (
        {f"{name}.py" for name in named if "test" not in name}
        == {"ir/rules.py", "sim/unit_table.py", "runtime/executor.py", "show/colours.py"}
        <= set(LATE)
    )
