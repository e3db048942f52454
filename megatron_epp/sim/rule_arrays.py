"""Dependencies between ops ("needs" of the rule table) as a small array, for compiled loops."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from megatron_epp.ir import KIND_CODE, Payload, Relation, Rules, StagePosition, rules_for
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
    """Return the dependencies between ops as rows for :func:`engine.run`, in rule-table order."""
    needs = []
    for kind, rule in rules.items():
        for need in rule.needs:
            met_by = sum(1 << KIND_CODE[other] for other in need.kinds)
            relation, payload = RELATION_CODE[need.chunk], PAYLOAD_CODE[need.payload]
            stage = need.stage if isinstance(need.stage, int) else FROM_LAST
            position = POSITION_CODE[need.at]
            needs.append((KIND_CODE[kind], met_by, stage, relation, payload, position))
    return np.array(needs, np.int64).reshape(-1, 6)


@lru_cache(maxsize=4)
def needs_for(vocabulary_parallel: bool, forward_only: bool = False) -> np.ndarray:
    """Return the dependencies between ops (:func:`needs_array`) of plans with these properties."""
    return needs_array(rules_for(vocabulary_parallel, forward_only))
