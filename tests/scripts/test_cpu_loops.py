"""The benchmark of loops replays orders as the planner plays them."""

import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
sys.path.insert(0, str(BENCH))

import cpu_loops  # noqa: E402

from megatron_epp.ir import KIND_CODE  # noqa: E402
from megatron_epp.planner.calls.call_cost import features  # noqa: E402
from megatron_epp.planner.calls.call_options import CallOptions  # noqa: E402
from tests.planner.calls.one_replica import call_plan  # noqa: E402
from tests.planner.calls.test_group_order import rates  # noqa: E402

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
