"""What a layer carries from slice to slice as a state, one for every border whatever the tokens, is
an item like others: rule table, cost model and simulator take it, and the store (tests/layers)."""

from pathlib import Path

import pytest

from tests.ir.edited_copy import run_with

# A state at the end of every slice but the last: made by its F, read by the next one's F and B,
# whose gradient that B leaves for its own B. By file what is written and before which line.
EDITS = {
    "ir/rules.py": [
        (
            '    WORKSPACE = "workspace"',
            '    STATES = "states"\n    STATE_GRADIENTS = "state_gradients"\n',
        ),
        (
            "\n\ndef held(",
            """
_AT_BORDER = (Effect(Item.STATES), Effect(Item.STATE_GRADIENTS))


def _with_states(kind: Kind) -> Rule:
    rule = RULES[kind]
    if kind is Kind.FORWARD:
        freed = Effect(Item.STATES, only=EVALUATION, chunk=Relation.EARLIER)
        return Rule(rule.needs, (*rule.makes, Effect(Item.STATES)), (*rule.frees, freed))
    left = Effect(Item.STATE_GRADIENTS, chunk=Relation.EARLIER)
    return Rule(rule.needs, (*rule.makes, left), (*rule.frees, *_AT_BORDER), rule.only)


RULES = {**RULES, **{kind: _with_states(kind) for kind in (Kind.FORWARD, *BACKWARDS)}}
""",
        ),
    ],
    "cost/cost.py": [
        (
            "            Item.WEIGHT_INPUTS: self.weight_input_bytes(loads),\n",
            """\
            Item.STATES: np.outer(self.layers, 2.0**20 * (np.asarray(loads.later) >= 0)),
            Item.STATE_GRADIENTS: np.outer(
                self.layers, 2.0**20 * (np.asarray(loads.later) >= 0)
            ),
""",
        )
    ],
}
USE = """
import dataclasses
import numpy as np
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Item, Plan, slices_of
from megatron_epp.planner import Options, planner_of
from megatron_epp.sim.play import play

MIB = 2.0**20
cost = dataclasses.replace(named_cost("llama3-8b", "h100-80g", pp=2), layers=(3, 5))

def plan(*borders, orders):
    ends = (0, *borders)
    spans = [f"chunk {c}: 0[{a}:{b}]" for c, (a, b) in enumerate(zip(ends, borders))]
    keeps = " ".join(["3k"] * len(borders)), " ".join(["5k"] * len(borders))
    return Plan.parse("\\n".join([
        "plan v1", "replica 0 of 1", f"documents {borders[-1]}", "layers 3 5", *spans,
        f"recompute 0: {keeps[0]}", f"recompute 1: {keeps[1]}",
        f"stage 0: {orders}", f"stage 1: {orders}", ""]))

def states(plan, stage):
    '''(while it runs, afterwards) of every op of a stage: MiB of a layer's states and gradients.'''
    table = cost.table(plan)
    nothing = {item: np.zeros_like(table.held_bytes[item])
               for item in (Item.STATES, Item.STATE_GRADIENTS)}
    without = dataclasses.replace(table, held_bytes={**table.held_bytes, **nothing})
    with_, plain = play(plan, table), play(plan, without)
    assert set(with_.left_bytes) == {0.0}, with_.left_bytes
    pairs = zip(with_.memory_curve(stage), plain.memory_curve(stage))
    return [round((a[1] - b[1]) / MIB / cost.layers[stage]) for a, b in pairs]

three = "F0 F1 F2 B2 B1 B0"
for tokens in (1000, 4000):  # as many states for four times the tokens
    made = plan(tokens, 2 * tokens, 3 * tokens, orders=three)
    for stage in (0, 1):
        assert states(made, stage) == [1, 1, 2, 2, 2, 2, 3, 3, 4, 2, 2, 0], states(made, stage)
split = plan(1000, 2000, 3000, orders="F0 F1 F2 I2 I1 W2 I0 W1 W0")
assert states(split, 0) == [1, 1, 2, 2, 2, 2, 3, 3, 4, 2, 2, 2, 2, 0, 0, 0, 0, 0]
evaluation = plan(1000, 2000, 3000, orders="F0 F1 F2")
assert states(evaluation, 1) == [1, 1, 2, 1, 1, 0], states(evaluation, 1)
whole = plan(3000, orders="F0 B0")
assert set(states(whole, 0)) == {0}
# Planners search with them, too: what is predicted is what the simulator finds.
found = planner_of("epp")([60000, 500, 300], cost, Options(effort=0))
assert max(slices_of(found.plan).later) >= 0
played = play(found.plan, cost.table(found.plan))
assert found.peak_bytes == played.peak_bytes
print("carried")
"""


def test_an_item_that_follows_borders_is_accounted_for(tmp_path: Path) -> None:
    done = run_with(EDITS, USE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "carried\n"


@pytest.mark.parametrize("lost", ["chunk=Relation.EARLIER", "*_AT_BORDER"])
def test_without_a_part_of_its_rows_bytes_are_left(tmp_path: Path, lost: str) -> None:
    (first, (line, rows), *others), cost = EDITS["ir/rules.py"], EDITS["cost/cost.py"]
    broken = {"ir/rules.py": [first, (line, rows.replace(lost, "")), *others], "cost/cost.py": cost}
    done = run_with(broken, USE, tmp_path)
    assert done.returncode != 0 and "AssertionError" in done.stderr, done.stderr
