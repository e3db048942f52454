"""Every row of the rule table is load-bearing.

GOLDEN says, by hand, what the table means on small plans: who is refused and why, which messages
travel, how many bytes of which item are held. One test compares; another deletes every row in
turn and expects the comparison to fail.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_epp.ir import (
    COMPUTE,
    DOCUMENT_ITEMS,
    OF_LAYERS,
    Item,
    Kind,
    Need,
    Op,
    Payload,
    Plan,
    PlanError,
    Rules,
    Table,
    check,
    lower,
    needs_of,
    rules_for,
    slices_of,
    walk,
)
from megatron_epp.ir.rules import ANY_PLAN, RULES, PlanTrait, held
from megatron_epp.sim.engine import run
from megatron_epp.sim.inputs import op_arrays, orders_of
from megatron_epp.sim.rule_arrays import needs_array

CUT = "documents 8\n{layers}\nchunk 0: 0[0:5]\nchunk 1: 0[5:8]\n"
WHOLE = "documents 5 3\n{layers}\nchunk 0: 0[0:5]\nchunk 1: 1[0:3]\n"

WORKSPACE_BYTES = 10_000
BYTES = {
    Item.ACTIVATIONS: 1,
    Item.KV: 10,
    Item.KV_GRADIENTS: 100,
    Item.WEIGHT_INPUTS: 1000,
    Item.HEAD_INPUTS: 100_000,
}

ONE = "documents 5\n{layers}\nchunk 0: 0[0:5]\n"

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
    "H before the last F": (ONE, "H0 F0 B0 G0", "F0 H0 B0 G0"),
    "H before the H before": (WHOLE, "F0 F1 H0 B0 H1 B1 G0 G1", "F0 F1 H1 B1 H0 B0 G0 G1"),
    "B before its loss": (ONE, "F0 H0 B0 G0", "F0 B0 H0 G0"),
    "I before its loss": (ONE, "F0 H0 B0 G0", "F0 I0 W0 H0 G0"),
    "G before its gradient": (ONE, "F0 H0 G0 B0", "F0 H0 G0 B0"),
    "G before its H": (ONE, "F0 H0 B0 G0", "F0 G0 H0 B0"),
    "vocabulary": (ONE, "F0 H0 B0 G0", "F0 H0 G0 B0"),
    "vocabulary, split": (ONE, "F0 H0 I0 G0 W0", "F0 H0 I0 W0 G0"),
    "vocabulary, three stages": (ONE, "F0 H0 B0 G0", "F0 H0 I0 W0 G0", "F0 H0 B0 G0"),
    "vocabulary, evaluation": (ONE, "F0 H0", "F0 H0"),
}

# Bytes: activations 1, K/V 10, K/V gradients 100, weight inputs 1000, workspace 10000, head inputs
# 100000. For every op, what is held while it runs > and after it.
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
        "I0<B0|I0 I1<B1|I1 F1<F1 F0<F0",
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
        "F0<F0 F1<F1",
    ),
    "H before the last F": "stage 0 at H0: lacks F0 of stage 1 (the model's output); "
    "stage 1 at F0: lacks F0 of stage 0 (its input)",
    "H before the H before": "stage 0 at B0: lacks B0 of stage 1 (the gradient of its output); "
    "stage 1 at H1: lacks H1 of stage 0 (what the vocabulary's rows before made)",
    "B before its loss": "stage 1 at B0: lacks H0 of stage 1 (the gradient of the model's output)",
    "I before its loss": "stage 1 at I0: lacks H0 of stage 1 (the gradient of the model's output)",
    "G before its gradient": "stage 0 at G0: lacks B0 of stage 0 "
    "(the log-sum-exp that came with its gradient)",
    "G before its H": "stage 1 at G0: lacks H0 of stage 1 (what its H left for it)",
    "vocabulary": (
        "F0 SEND:F0>1 POST:H0<1 RECV:H0<1 H0 SEND:H0>1 POST:B0<1 RECV:B0<1 B0 G0",
        "POST:F0<0 RECV:F0<0 F0 SEND:H0>0 POST:H0<0 RECV:H0<0 H0 G0 B0 SEND:B0>0",
        "H0<F0 B0<B0|I0 F0<F0 H0<H0",
        "10001>1 110001>100001 110001>100000 110000>0 10001>1 110001>100001 110001>1 10001>0",
    ),
    "vocabulary, split": (
        "F0 SEND:F0>1 POST:H0<1 RECV:H0<1 H0 SEND:H0>1 POST:B0<1 RECV:B0<1 I0 G0 W0",
        "POST:F0<0 RECV:F0<0 F0 SEND:H0>0 POST:H0<0 RECV:H0<0 H0 I0 SEND:B0>0 W0 G0",
        "H0<F0 I0<B0|I0 F0<F0 H0<H0",
        "10001>1 110001>100001 111001>101000 111000>1000 11000>0 "
        "10001>1 110001>100001 111001>101000 111000>100000 110000>0",
    ),
    "vocabulary, three stages": (
        "F0 SEND:F0>1 POST:H0<2 RECV:H0<2 H0 SEND:H0>1 POST:B0<1 RECV:B0<1 B0 G0",
        "POST:F0<0 RECV:F0<0 F0 SEND:F0>2 POST:H0<0 RECV:H0<0 H0 SEND:H0>2 POST:B0<2 RECV:B0<2 "
        "I0 SEND:B0>0 W0 G0",
        "POST:F0<1 RECV:F0<1 F0 SEND:H0>0 POST:H0<1 RECV:H0<1 H0 B0 SEND:B0>1 G0",
        "H0<F0 B0<B0|I0 F0<F0 H0<H0 I0<B0|I0 F0<F0 H0<H0",
        "10001>1 110001>100001 110001>100000 110000>0 "
        "10001>1 110001>100001 111001>101000 111000>100000 110000>0 "
        "10001>1 110001>100001 110001>100000 110000>0",
    ),
    "vocabulary, evaluation": (
        "F0 SEND:F0>1 POST:H0<1 RECV:H0<1 H0 SEND:H0>1",
        "POST:F0<0 RECV:F0<0 F0 SEND:H0>0 POST:H0<0 RECV:H0<0 H0",
        "H0<F0 F0<F0 H0<H0",
        "10000>0 10000>0 10000>0 10000>0",
    ),
}


def plan_of(name: str) -> Plan:
    head, *orders = PLANS[name]
    layers = "layers" + " 1" * len(orders)
    stages = "".join(f"stage {stage}: {order}\n" for stage, order in enumerate(orders))
    return Plan.parse("plan v1\n" + head.format(layers=layers) + stages)


def ledger(plan: Plan, rules: Rules) -> str:
    ones = np.ones((plan.stages, len(plan.chunks)))
    # Of documents as of chunks: the owners differ, the bytes do not.
    held = {
        item: np.full((plan.stages, 9), each) if item in DOCUMENT_ITEMS else each * ones
        for item, each in BYTES.items()
    }
    table = Table(
        seconds=dict.fromkeys(COMPUTE, ones),
        recompute_seconds=0 * ones,
        comm_seconds=dict.fromkeys(COMPUTE, 0 * ones),
        link_seconds={p: ones if p is Payload.HEAD else ones[1:] for p in Payload},
        link_latency_seconds=0.0,
        held_bytes=held,
        workspace_bytes=dict.fromkeys(COMPUTE, WORKSPACE_BYTES * ones),
        resident_bytes=[0.0] * plan.stages,
    )
    arrays = op_arrays(table, slices_of(plan), rules, plan.orders)
    result = run(orders_of(plan), arrays, needs_array(rules))
    pairs = zip(result.op_peak, result.op_left, strict=True)
    return " ".join(f"{peak:.0f}>{left:.0f}" for peak, left in pairs)


def arrivals(plan: Plan, rules: Rules) -> str:
    """What every op of stage 1 needs of stage 0, and the other way round."""
    needs = needs_of(plan, rules)
    waits = (
        f"{op}<{'|'.join(map(str, ops))}"
        for stage, order in enumerate(plan.orders)
        for op in order
        for _, where, ops in needs(stage, op)
        if where != stage
    )
    return " ".join(waits)


def observed(table: Rules) -> dict:
    """What ``table`` makes of the plans."""
    found: dict = {}
    for name in PLANS:
        plan = plan_of(name)
        traits = PlanTrait.EVALUATION if plan.forward_only else PlanTrait.TRAINING
        if plan.vocabulary_parallel:
            traits |= PlanTrait.VOCABULARY
        rules = held(table, traits)
        try:
            check(plan, rules)
        except PlanError as error:
            found[name] = str(error).splitlines()[0]
            continue
        if plan.stages > 1:
            programs = tuple(" ".join(map(str, program)) for program in lower(plan, rules))
            found[name] = (*programs, arrivals(plan, rules))
            if plan.vocabulary_parallel:
                found[name] = (*found[name], ledger(plan, rules))
        else:
            found[name] = ledger(plan, rules)
    return found


def test_the_table_means_what_it_says() -> None:
    assert observed(RULES) == GOLDEN


def changed() -> Iterator[tuple[str, Rules]]:
    """The table without one row, for every row; and with it unmarked, where it is marked."""
    for kind, rule in RULES.items():
        for part in ("needs", "makes", "frees"):
            rows = getattr(rule, part)
            for index, row in enumerate(rows):
                what = row.why if isinstance(row, Need) else f"{row.item.value} {row.slice.name}"
                others = [()]
                if row.only is not ANY_PLAN:
                    others.append((dataclasses.replace(row, only=ANY_PLAN),))
                for other in others:
                    new = (*rows[:index], *other, *rows[index + 1 :])
                    name = f"{kind.value} {part} {what}{' unmarked' * bool(other)}"
                    yield name, {**RULES, kind: dataclasses.replace(rule, **{part: new})}


ROWS = dict(changed())


@pytest.mark.parametrize("table", ROWS.values(), ids=ROWS)
def test_no_row_can_go_nor_lose_its_mark(table: Rules) -> None:
    assert observed(table) != GOLDEN


def test_every_kind_has_its_rule() -> None:
    training, evaluation = rules_for(False), rules_for(False, forward_only=True)
    assert set(training) == set(OF_LAYERS)
    assert set(rules_for(True)) == set(COMPUTE)
    assert set(evaluation) == {Kind.FORWARD}
    assert set(rules_for(True, forward_only=True)) == {Kind.FORWARD, Kind.HEAD}
    assert len([name for name in ROWS if not name.endswith(" unmarked")]) == 42


def test_every_branch_is_needed() -> None:
    """Two documents that continue a first one: its backward waits for those of both."""
    plan = Plan.parse(
        "plan v1\ndocuments 5 3 2\nprefix 1: 0[0:5]\nprefix 2: 0[0:5]\nlayers 1\n"
        "chunk 0: 0[0:5]\nchunk 1: 1[0:3]\nchunk 2: 2[0:2]\nstage 0: F0 F1 F2 B1 B2 B0\n"
    )
    needs = needs_of(plan)
    assert [ops[0] for _, _, ops in needs(0, Op.parse("B0"))] == list(
        map(Op.parse, ("F0", "B1", "B2"))
    )
    assert [op for _, op in walk(plan)] == list(plan.orders[0])
    early = dataclasses.replace(
        plan, orders=(tuple(map(Op.parse, ["F0", "F1", "F2", "B1", "B0", "B2"])),)
    )
    with pytest.raises(PlanError, match="stage 0 at B0: lacks B2 of stage 0"):
        check(early)
    # K and V from the first forward to the last backward, their gradients from the first branch's.
    assert ledger(plan, rules_for(False)) == (
        "10011>11 10012>12 10013>13 10113>112 10112>111 10111>0"
    )
    other = "F0 F1 B1 F2 B2 B0"
    plan = dataclasses.replace(plan, orders=(tuple(map(Op.parse, other.split())),))
    assert ledger(plan, rules_for(False)) == (
        "10011>11 10012>12 10112>111 10112>112 10112>111 10111>0"
    )
