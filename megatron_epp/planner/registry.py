"""The planners by name.

A pipeline planner is a function ``draft(batch, cost, options)``; what is alike for all of them is
here: the batch is sorted, a document that fits no plan is refused, the draft is checked, played
and timed.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_epp.cost.catalogue.named import unknown_name
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.baselines import chunkflow, packing, seq1f1b
from megatron_epp.planner.device_groups import flexsp, hybrid_cp
from megatron_epp.planner.epp import planner as epp
from megatron_epp.planner.feasibility import require_fit
from megatron_epp.planner.infinipipe import planner as infinipipe
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.emit_block import PlannedBlock, emit_block
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.planner.result import PlannedGroups, PlannedReplica, SimulatedPipeline
from megatron_epp.planner.virtual import adaptis, placed, slimpipe
from megatron_epp.planner.virtual.methods import METHODS

DraftFunction = Callable[[SortedBatch, Cost, Options], ScoredDraft | None]
PlanFunction = Callable[[Sequence[int], Cost, Options], PlannedReplica]
BlockFunction = Callable[[Sequence[int], Cost, Options], PlannedBlock]
GroupFunction = Callable[[Sequence[int], Cost, Options], PlannedGroups]
SimulatedFunction = Callable[[Sequence[int], Cost, Options], SimulatedPipeline]


def _block(name: str, draft: DraftFunction | None = None) -> BlockFunction:
    """The planner ``name``, which plans by ``draft``, or as for several stages on a rank, for the
    replicas of a block (options.lockstep), whose documents it deals to them. A PlanError where a
    document fits no plan."""

    def plan(lengths: Sequence[int], cost: Cost, options: Options) -> PlannedBlock:
        began = time.perf_counter()
        batch = SortedBatch.of(lengths)
        require_fit(cost, batch.documents)
        alone = draft is not None and not cost.layout.place
        made = (
            draft(batch, cost, options)  # type: ignore[misc]
            if alone
            else placed.draft(name, batch, cost, options)
        )
        assert made is not None, "nothing was excluded, so there is a draft"
        found = emit_block(name, batch, made.draft, made.cost, options)
        took = (time.perf_counter() - began) / options.lockstep
        planned = tuple(dataclasses.replace(each, plan_seconds=took) for each in found.planned)
        return dataclasses.replace(found, planned=planned)

    return plan


def _alone(block: BlockFunction) -> PlanFunction:
    """``block`` for one replica."""

    def plan(lengths: Sequence[int], cost: Cost, options: Options) -> PlannedReplica:
        (planned,) = block(lengths, cost, options).planned
        return planned

    return plan


def _timed[T: (PlannedGroups, SimulatedPipeline)](
    group: Callable[[Sequence[int], Cost, Options], T],
) -> Callable[[Sequence[int], Cost, Options], T]:
    """``group``, timed; it knows no H and G."""

    def plan(lengths: Sequence[int], cost: Cost, options: Options) -> T:
        began = time.perf_counter()
        planned = group(lengths, cost.with_vocabulary(False), options)
        return dataclasses.replace(planned, plan_seconds=time.perf_counter() - began)

    return plan


_DRAFTS: Mapping[str, DraftFunction] = {
    "epp": epp.draft,
    "infinipipe": infinipipe.draft,
    "seq1f1b": seq1f1b.draft,
    "chunkflow": chunkflow.draft,
    "packing": packing.draft,
}
# Planners whose plans a pipeline can run: for the replicas of a block together,
BLOCKS: Mapping[str, BlockFunction] = {
    **{name: _block(name, draft) for name, draft in _DRAFTS.items()},
    **{name: _block(name) for name in METHODS},
}
# and plan(lengths, cost, options) for one.
PIPELINES: Mapping[str, PlanFunction] = {name: _alone(BLOCKS[name]) for name in _DRAFTS}
# And published methods, where they are asked for by name.
EXECUTED: Mapping[str, PlanFunction] = {
    **PIPELINES,
    **{name: _alone(BLOCKS[name]) for name in METHODS},
}
# Of these, those that can leave every document whole.
WHOLE = ("epp", "packing", "1f1b", "zb-v", "adaptis")
# Methods without a pipeline, for comparison.
GROUPS: Mapping[str, GroupFunction] = {
    "flexsp": _timed(flexsp.plan),
    "megatron-hybrid-cp": _timed(hybrid_cp.plan),
}
# Methods that choose what lies where by themselves, for comparison where they are asked for by name
# and no placement is.
SIMULATED: Mapping[str, SimulatedFunction] = {
    "adaptis": _timed(adaptis.plan),
    "slimpipe": _timed(slimpipe.plan),
}
PLANNERS: Mapping[str, Callable[[Sequence[int], Cost, Options], PlannedReplica | PlannedGroups]] = {
    **PIPELINES,
    **GROUPS,
}


def planner_of(name: str, whole: bool = False) -> PlanFunction:
    """The planner called ``name``; a ValueError with the near matches where there is none, or
    where it makes no pipeline plan, or none with ``whole`` documents where that is asked."""
    if whole and name in EXECUTED and name not in WHOLE:
        raise ValueError(
            f"planner {name!r} cuts documents, which must stay whole here; expected one of "
            f"{', '.join(WHOLE)}"
        )
    if name in EXECUTED:
        return EXECUTED[name]
    if name in GROUPS:
        raise ValueError(
            f"planner {name!r} makes no pipeline plan, so nothing can run it; "
            f"expected one of {', '.join(PIPELINES)}"
        )
    raise ValueError(unknown_name("planner", name, EXECUTED))


def makes_plans(name: str, cost: Cost, options: Options) -> bool:
    """Whether the planner makes a plan that runs: a method that chooses what lies where does where
    a placement, or layers of the stages, are given."""
    chooses = name in SIMULATED and options.open_layers and not cost.layout.place
    return name in EXECUTED and not chooses
