"""The planners by name."""

from collections.abc import Callable, Mapping, Sequence

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.did_you_mean import unknown_name
from megatron_epp.planner.baselines import chunkflow, packing, seq1f1b
from megatron_epp.planner.device_groups import flexsp, hybrid_cp
from megatron_epp.planner.epp import planner as epp
from megatron_epp.planner.infinipipe import planner as infinipipe
from megatron_epp.planner.options import Options
from megatron_epp.planner.result import Planned, PlannedGroups

PlanFunction = Callable[[Sequence[int], Cost, Options], Planned]

# Planners whose plans a pipeline can run: plan(lengths, cost, options) for one replica.
PIPELINES: Mapping[str, PlanFunction] = {
    "epp": epp.plan,
    "infinipipe": infinipipe.plan,
    "seq1f1b": seq1f1b.plan,
    "chunkflow": chunkflow.plan,
    "packing": packing.plan,
}
# Methods without a pipeline, for comparison.
GROUPS: Mapping[str, Callable[[Sequence[int], Cost, Options], PlannedGroups]] = {
    "flexsp": flexsp.plan,
    "megatron-hybrid-cp": hybrid_cp.plan,
}
PLANNERS: Mapping[str, Callable[[Sequence[int], Cost, Options], Planned | PlannedGroups]] = {
    **PIPELINES,
    **GROUPS,
}


def planner_of(name: str) -> PlanFunction:
    """The planner called ``name``; a ValueError with the near matches where there is none, or
    where it makes no pipeline plan."""
    if name in PIPELINES:
        return PIPELINES[name]
    if name in GROUPS:
        raise ValueError(
            f"planner {name!r} makes no pipeline plan, so nothing can run it; "
            f"expected one of {', '.join(PIPELINES)}"
        )
    raise ValueError(unknown_name("planner", name, PIPELINES))
