"""Methods without a pipeline, for comparison only: `flexsp` and `megatron-hybrid-cp`.

This is an optional plug-in of ``megatron-epp compare``, which finds it in a checkout. No training
runs these methods.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.result import PlannerResult

from . import flexsp, hybrid_cp
from .costs import best_groups

DIVIDE = {"flexsp": flexsp.divide, "megatron-hybrid-cp": hybrid_cp.divide}
METHODS: Mapping[str, Callable[[Sequence[int], Cost, Options], PlannerResult]] = {
    name: partial(best_groups, name, divide) for name, divide in DIVIDE.items()
}


def planned(name: str, lengths: Sequence[int], cost: Cost, options: Options) -> PlannerResult:
    """Return the result of the planner or method ``name``."""
    plan = METHODS[name] if name in METHODS else PLANNERS[name]
    return plan(lengths, cost, options)
