"""The benchmark of loops replays orders as the planner plays them."""

import cpu_loops
import numpy as np
import pytest

from megatron_epp.ir import KIND_CODE
from megatron_epp.planner.calls.call_cost import features
from megatron_epp.planner.calls.call_options import CallOptions
from tests.planner.calls.one_replica import call_plan
from tests.planner.calls.test_group_order import rates

pytestmark = pytest.mark.everything


def test_what_was_predicted_is_what_is_replayed() -> None:
    tokens = [100, 400, 100, 300, 100, 200, 100, 350]
    stages = 4
    documents = [(n,) for n in tokens]
    options = CallOptions(cut=False, had_bytes=3200.0)
    plan = call_plan(documents, (1,) * stages, rates(stages), options, False)
    pairs = [n * (n + 1) / 2 for n in tokens]
    seconds = np.einsum("skf,fc->ksc", rates(stages), features(tokens, pairs))
    measured = [
        [(op.kind.value, op.chunk, seconds[KIND_CODE[op.kind], stage, op.chunk]) for op in order]
        for stage, order in enumerate(plan.orders)
    ]
    assert plan.predicted is not None
    assert cpu_loops.replay(measured) == pytest.approx(plan.predicted.seconds, rel=1e-9)
