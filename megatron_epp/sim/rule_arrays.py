"""The needs of the rule table as a small array, for compiled loops. No rule is written here."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from megatron_epp.ir import (
    EVALUATION,
    KIND_CODE,
    TRAINING,
    VOCABULARY_EVALUATION,
    VOCABULARY_TRAINING,
    Payload,
    Plan,
    Relation,
    Rules,
    StagePosition,
)
from megatron_epp.sim.engine import (
    ANYWHERE,
    BEFORE_LAST,
    EARLIER,
    FROM_LAST,
    LATER,
    ON_FIRST,
    ON_LAST,
    SAME,
)

PAYLOAD_CODE: Mapping[Payload, int] = {payload: code for code, payload in enumerate(Payload)}
RELATION_CODE = {Relation.SAME: SAME, Relation.EARLIER: EARLIER, Relation.LATER: LATER}
POSITION_CODE = {
    StagePosition.ANY: ANYWHERE,
    StagePosition.FIRST: ON_FIRST,
    StagePosition.LAST: ON_LAST,
    StagePosition.BEFORE_LAST: BEFORE_LAST,
}


def needs_array(rules: Rules) -> np.ndarray:
    """Rows in the table's order, as :func:`engine.run` reads them: row r is the r-th need of all
    kinds."""
    needs = []
    for kind, rule in rules.items():
        for need in rule.needs:
            met_by = sum(1 << KIND_CODE[other] for other in need.kinds)
            relation, payload = RELATION_CODE[need.chunk], PAYLOAD_CODE[need.payload]
            stage = need.stage if isinstance(need.stage, int) else FROM_LAST
            position = POSITION_CODE[need.at]
            needs.append((KIND_CODE[kind], met_by, stage, relation, payload, position))
    return np.array(needs, np.int64).reshape(-1, 6)


@lru_cache(maxsize=2)
def training_needs(vocabulary_parallel: bool = False) -> np.ndarray:
    return needs_array(VOCABULARY_TRAINING if vocabulary_parallel else TRAINING)


@lru_cache(maxsize=2)
def evaluation_needs(vocabulary_parallel: bool = False) -> np.ndarray:
    return needs_array(VOCABULARY_EVALUATION if vocabulary_parallel else EVALUATION)


def needs_for(plan: Plan) -> np.ndarray:
    """The needs of the rule table that governs ``plan``."""
    of_kind = evaluation_needs if plan.forward_only else training_needs
    return of_kind(plan.vocabulary_parallel)
