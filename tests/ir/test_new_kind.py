"""A new kind of op touches what ir/op.py promises: rules, seconds, executor, picture."""

import re
from pathlib import Path

from megatron_epp.ir import op
from tests.ir.edited_copy import run_with

# A note: an op without needs or effects that every stage runs of every chunk, by file what is
# written and before which line.
EDITS = {
    "ir/op.py": [('    SEND = "SEND"\n', '    NOTE = "N"\n')],
    "ir/rules.py": [
        ("    Kind.BACKWARD: Rule(", "    Kind.NOTE: Rule((), (), (), TRAINING),\n"),
        ("\n\ndef held(", "\nCHUNK_OPS = tuple((*kinds, Kind.NOTE) for kinds in CHUNK_OPS)\n"),
    ],
    "sim/unit_table.py": [("\n\ndef unit_table", "UNITS[Kind.NOTE] = 0.5\n")],
    "runtime/executor.py": [
        ("            Kind.SEND: self._send,\n", "            Kind.NOTE: lambda op: None,\n")
    ],
    "show/colours.py": [
        ("\nINK = ", '\nFAMILIES[Kind.NOTE] = Family("note", 0, 0.3, ",", "37", "rail_idle")\n')
    ],
}
USE = """
import megatron_epp
from megatron_epp.ir import Kind, Op, Plan, PlanError, check, lower
from megatron_epp.runtime.executor import Executor
from megatron_epp.show.page import to_html
from megatron_epp.show.text import text_gantt
from megatron_epp.show.timeline import timeline_of
from megatron_epp.show.trace import to_trace
from megatron_epp.sim.play import play
from megatron_epp.sim.unit_table import unit_table

TEXT = '''plan v1
replica 0 of 1
documents 8
layers 1 1
chunk 0: 0[0:5]
chunk 1: 0[5:8]
recompute 0: 1k 1k
recompute 1: 1k 1k
stage 0: F0 N0 F1 N1 B1 B0
stage 1: N0 N1 F0 F1 B1 I0 W0
'''
plan = Plan.parse(TEXT)
assert str(plan) == TEXT
check(plan)
try:
    check(Plan.parse(TEXT.replace("N0 N1 F0", "N0 F0")))
except PlanError as error:
    assert str(error) == "stage 1: chunk 1 has ops B F; expected F B N or F I W N", error
played = play(plan, unit_table(plan))
notes = [record for record in played.records if record.op.kind is Kind.NOTE]
assert [note.seconds for note in notes] == [0.5] * 4
ops = [str(op) for op in lower(plan)[1] if isinstance(op, Op)]
assert ops == TEXT.split("stage 1: ")[1].split()
timeline = timeline_of(played)
assert "N0" in text_gantt(timeline, 120), text_gantt(timeline, 120)
assert '"name":"N0"' in to_trace(timeline)
assert "note" in to_html(timeline)
assert set(Executor((), *[None] * 6)._do) == set(Kind)
print(megatron_epp.__file__)
"""


def test_a_new_kind_touches_what_is_promised(tmp_path: Path) -> None:
    done = run_with(EDITS, USE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "megatron_epp") in done.stdout


def test_the_docstring_names_the_places() -> None:
    named = set(re.findall(r"\b(?:ir|sim|runtime|show)/[a-z_]+", op.Kind.__doc__ or ""))
    assert {f"{name}.py" for name in named} | {"ir/op.py"} == set(EDITS) | {
        "ir/test_new_kind.py",
        "ir/test_costly_kind.py",
    }
