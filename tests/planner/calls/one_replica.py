"""Plans of one replica's calls."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.ir import Plan
from megatron_epp.planner.calls.call_cost import CallDocuments
from megatron_epp.planner.calls.call_options import CallOptions
from megatron_epp.planner.calls.call_plan import call_plans
from megatron_epp.planner.chunks.tree_cutting import Parents


def call_plan(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    options: CallOptions,
    forward_only: bool,
    parents: Sequence[Parents] = (),
) -> Plan:
    (plan,) = call_plans(
        [CallDocuments(lengths, parents)], layers, rates_SK3, options, forward_only
    )
    return plan
