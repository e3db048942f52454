"""Every row of the rule table is load-bearing.

GOLDEN says, by hand, what the table means on small plans: who is refused and why, which messages
travel, how many bytes of which item are held. One test compares; another deletes every row in
turn and expects the comparison to fail.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from megatron_epp.ir import (
    COMPUTE,
    EVALUATION,
    TRAINING,
    Kind,
    Need,
    Plan,
    PlanError,
    Rule,
    check,
    lower,
    slices_of,
)
from megatron_epp.sim.engine import Board, run
from megatron_epp.sim.inputs import orders_of
from megatron_epp.sim.rule_arrays import HELD, Rows, rows_of

check_module = __import__("megatron_epp.ir.check", fromlist=["check"])

CUT = "documents 8\n{layers}\nchunk 0: 0[0:5]\nchunk 1: 0[5:8]\n"
WHOLE = "documents 5 3\n{layers}\nchunk 0: 0[0:5]\nchunk 1: 1[0:3]\n"

# By name: (documents and chunks, orders of stage 0, 1, ...).
PLANS = {
    "later slice first": (CUT, "F1 F0 B1 B0"),
    "earlier backward first": (CUT, "F0 F1 B0 B1"),
    "earlier I first": (CUT, "F0 F1 I0 W0 I1 W1"),
    "B without F": (WHOLE, "B0 F0 F1 B1"),
    "I without F": (WHOLE, "I0 F0 F1 W0 B1"),
    "W without I": (WHOLE, "F0 W0 I0 F1 B1"),
    "F before its input": (WHOLE, "F0 B0 F1 B1", "F1 B1 F0 B0"),
    "B before its gradient": (WHOLE, "F0 B0 F1 B1", "F0 F1 B0 B1"),
    "I before its gradient": (WHOLE, "F0 I0 F1 B1 W0", "F0 F1 B0 B1"),
    "I's gradient from I": (WHOLE, "F0 F1 I0 W0 I1 W1", "F1 F0 I1 I0 W0 W1"),
    "slices": (CUT, "F0 F1 B1 B0"),
    "slices, split": (CUT, "F0 F1 I1 I0 W1 W0"),
    "wholes": (WHOLE, "F0 F1 B0 B1"),
    "wholes, split": (WHOLE, "F0 F1 I0 I1 W0 W1"),
    "evaluation, later slice first": (CUT, "F1 F0"),
    "evaluation, slices": (CUT, "F0 F1"),
    "evaluation, wholes": (WHOLE, "F0 F1"),
    "evaluation, stages": (WHOLE, "F0 F1", "F0 F1"),
}

# Bytes: activations 1, K/V 10, K/V gradients 100, weight inputs 1000, workspace 10000. For every
# op, what is held while it runs > and after it.
GOLDEN = {
    "later slice first": "stage 0 at F1: lacks F0 of stage 0 (the K and V of the slice before)",
    "earlier backward first": "stage 0 at B0: lacks B1 of stage 0 "
    "(the gradients of its K and V from the slice after)",
    "earlier I first": "stage 0 at I0: lacks I1 of stage 0 "
    "(the gradients of its K and V from the slice after)",
    "B without F": "stage 0 at B0: lacks F0 of stage 0 (what its forward saved)",
    "I without F": "stage 0 at I0: lacks F0 of stage 0 (what its forward saved)",
    "W without I": "stage 0 at W0: lacks I0 of stage 0 (what its I left for it)",
    "F before its input": "stage 0 at B0: lacks B0 of stage 1 (the gradient of its output); "
    "stage 1 at F1: lacks F1 of stage 0 (its input)",
    "B before its gradient": "stage 0 at B0: lacks B0 of stage 1 (the gradient of its output); "
    "stage 1 at F1: lacks F1 of stage 0 (its input)",
    "I before its gradient": "stage 0 at I0: lacks B0 of stage 1 (the gradient of its output); "
    "stage 1 at F1: lacks F1 of stage 0 (its input)",
    "I's gradient from I": (
        "F0 SEND:F0>1 F1 SEND:F1>1 POST:B1<1 POST:B0<1 RECV:B1<1 RECV:B0<1 I0 W0 I1 W1",
        "POST:F0<0 POST:F1<0 RECV:F0<0 RECV:F1<0 F1 F0 I1 SEND:B1>0 I0 SEND:B0>0 W0 W1",
    ),
    "slices": "10011>11 10012>12 10112>111 10111>0",
    "slices, split": "10011>11 10012>12 11112>1111 12111>2000 12000>1000 11000>0",
    "wholes": "10001>1 10002>2 10002>1 10001>0",
    "wholes, split": "10001>1 10002>2 11002>1001 12001>2000 12000>1000 11000>0",
    "evaluation, later slice first": "stage 0 at F1: lacks F0 of stage 0 "
    "(the K and V of the slice before)",
    "evaluation, slices": "10010>10 10010>0",
    "evaluation, wholes": "10000>0 10000>0",
    "evaluation, stages": (
        "F0 SEND:F0>1 F1 SEND:F1>1",
        "POST:F0<0 POST:F1<0 RECV:F0<0 F0 RECV:F1<0 F1",
    ),
}


def plan_of(name: str) -> Plan:
    head, *orders = PLANS[name]
    layers = "layers" + " 1" * len(orders)
    stages = "".join(f"stage {stage}: {order}\n" for stage, order in enumerate(orders))
    return Plan.parse("plan v1\n" + head.format(layers=layers) + stages)


def ledger(plan: Plan, rows: Rows) -> str:
    slices = slices_of(plan)
    shape = (1, len(plan.chunks))
    board = Board(
        np.ones((len(COMPUTE), *shape)),
        np.zeros((2, 1, len(plan.chunks))),
        0.0,
        np.stack([np.full(shape, 10.0**power) for power in range(len(HELD))]),
        np.full((len(COMPUTE), *shape), 10_000.0),
        np.zeros(1),
        *(np.array(tie) for tie in (slices.document, slices.earlier, slices.later)),
    )
    result = run(orders_of(plan.orders), board, rows)
    pairs = zip(result.op_peak, result.op_left, strict=True)
    return " ".join(f"{peak:.0f}>{left:.0f}" for peak, left in pairs)


def observed(
    monkeypatch: pytest.MonkeyPatch,
    training: Mapping[Kind, Rule] = TRAINING,
    evaluation: Mapping[Kind, Rule] = EVALUATION,
) -> dict:
    """What these tables make of the plans."""
    monkeypatch.setattr(check_module, "TRAINING", training)
    monkeypatch.setattr(check_module, "EVALUATION", evaluation)
    found: dict = {}
    for name in PLANS:
        plan = plan_of(name)
        try:
            check(plan)
        except PlanError as error:
            found[name] = str(error).splitlines()[0]
            continue
        if plan.stages > 1:
            found[name] = tuple(" ".join(map(str, program)) for program in lower(plan))
        else:
            rules = evaluation if plan.forward_only else training
            found[name] = ledger(plan, rows_of(rules))
    return found


def test_the_table_means_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert observed(monkeypatch) == GOLDEN


def without(rules: Mapping[Kind, Rule]) -> Iterator[tuple[str, Mapping[Kind, Rule]]]:
    """The table without one row, for every row."""
    for kind, rule in rules.items():
        for part in ("needs", "makes", "frees"):
            rows = getattr(rule, part)
            for index, row in enumerate(rows):
                what = row.why if isinstance(row, Need) else f"{row.item.value} {row.slice.name}"
                rest = (*rows[:index], *rows[index + 1 :])
                shorter = dataclasses.replace(rule, **{part: rest})
                yield f"{kind.value} {part} {what}", {**rules, kind: shorter}


ROWS = [(f"training {name}", {"training": rules}) for name, rules in without(TRAINING)]
ROWS += [(f"evaluation {name}", {"evaluation": rules}) for name, rules in without(EVALUATION)]


@pytest.mark.parametrize("tables", [tables for _, tables in ROWS], ids=[name for name, _ in ROWS])
def test_no_row_can_go(monkeypatch: pytest.MonkeyPatch, tables: dict) -> None:
    assert observed(monkeypatch, **tables) != GOLDEN


def test_every_kind_has_its_rule() -> None:
    assert set(TRAINING) == set(COMPUTE)
    assert set(EVALUATION) == {Kind.FORWARD}
    assert len(ROWS) == 35
