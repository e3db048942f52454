"""The needs of the rule table as a small array, for compiled loops. No rule is written here."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from megatron_epp.ir import EVALUATION, KIND_CODE, TRAINING, Kind, Payload, Plan, Relation, Rules
from megatron_epp.sim.engine import EARLIER, LATER, SAME

PAYLOAD_CODE: Mapping[Payload, int] = {payload: code for code, payload in enumerate(Payload)}
RELATION_CODE = {Relation.SAME: SAME, Relation.EARLIER: EARLIER, Relation.LATER: LATER}


def needs_array(rules: Rules) -> np.ndarray:
    """Rows in the table's order, as :func:`engine.run` reads them: row r is the r-th need of all
    kinds."""
    needs = []
    for kind, rule in rules.items():
        for need in rule.needs:
            met_by = sum(1 << KIND_CODE[other] for other in need.kinds)
            forward = need.kinds == (Kind.FORWARD,)
            payload = Payload.ACTIVATION if forward else Payload.GRADIENT
            relation = RELATION_CODE[need.chunk]
            needs.append((KIND_CODE[kind], met_by, need.stage, relation, PAYLOAD_CODE[payload]))
    return np.array(needs, np.int64).reshape(-1, 5)


@lru_cache(maxsize=1)
def training_needs() -> np.ndarray:
    return needs_array(TRAINING)


@lru_cache(maxsize=1)
def evaluation_needs() -> np.ndarray:
    return needs_array(EVALUATION)


def needs_for(plan: Plan) -> np.ndarray:
    """The needs of the rule table that governs ``plan``."""
    return evaluation_needs() if plan.forward_only else training_needs()
