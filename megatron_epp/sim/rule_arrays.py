"""The rule table as small arrays of numbers, for compiled loops. No rule is written here."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from megatron_epp.ir import (
    COMPUTE,
    EVALUATION,
    TRAINING,
    Item,
    Kind,
    Payload,
    Plan,
    Relation,
    Rule,
    Slice,
)
from megatron_epp.sim.engine import ANY, EARLIER, FIRST, LAST, LATER, SAME, WORKSPACE, Rows

KIND_CODE: Mapping[Kind, int] = {kind: code for code, kind in enumerate(COMPUTE)}
PAYLOAD_CODE: Mapping[Payload, int] = {payload: code for code, payload in enumerate(Payload)}
# Items by their row of Board.held; the workspace has a grid of its own.
HELD: tuple[Item, ...] = tuple(item for item in Item if item is not Item.WORKSPACE)
ITEM_CODE: Mapping[Item, int] = {
    Item.WORKSPACE: WORKSPACE,
    **{item: code for code, item in enumerate(HELD)},
}
RELATION_CODE = {Relation.SAME: SAME, Relation.EARLIER: EARLIER, Relation.LATER: LATER}
SLICE_CODE = {Slice.ANY: ANY, Slice.FIRST: FIRST, Slice.LAST: LAST}


def rows_of(rules: Mapping[Kind, Rule]) -> Rows:
    """``rules`` as rows, in the table's order: row r of needs is the r-th need of all kinds."""
    needs, effects = [], []
    for kind, rule in rules.items():
        for need in rule.needs:
            met_by = sum(1 << KIND_CODE[other] for other in need.kinds)
            forward = need.kinds == (Kind.FORWARD,)
            payload = Payload.ACTIVATION if forward else Payload.GRADIENT
            needs.append(
                (
                    KIND_CODE[kind],
                    met_by,
                    need.stage,
                    RELATION_CODE[need.chunk],
                    PAYLOAD_CODE[payload],
                )
            )
        for sign, row in ((+1, rule.makes), (-1, rule.frees)):
            for effect in row:
                effects.append(
                    (KIND_CODE[kind], sign, ITEM_CODE[effect.item], SLICE_CODE[effect.slice])
                )
    return Rows(np.array(needs, np.int64), np.array(effects, np.int64))


@lru_cache(maxsize=1)
def training_rows() -> Rows:
    return rows_of(TRAINING)


@lru_cache(maxsize=1)
def evaluation_rows() -> Rows:
    return rows_of(EVALUATION)


def rows_for(plan: Plan) -> Rows:
    """The rows of the rule table that governs ``plan``."""
    return evaluation_rows() if plan.forward_only else training_rows()
