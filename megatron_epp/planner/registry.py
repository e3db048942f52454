"""Table of the planners by name.

A planner is a function ``draft(batch, cost, options)`` that returns a plan as arrays. This module
contains the steps that all planners share. It sorts the batch, refuses documents that cannot fit,
checks and simulates the plan, and measures the planning time.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.cost.catalogue.named import unknown_name
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.chunks.tree_cutting import tree_seconds
from megatron_epp.planner.epp import planner as epp
from megatron_epp.planner.feasibility import no_plan_fits, require_fit
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options, with_effort
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.emit_block import PlannedBlock, emit_block
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.published import schedules
from megatron_epp.planner.published.infinipipe import planner as infinipipe
from megatron_epp.planner.published.schedules import Place, any_place
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.planner.tree_division import divided_trees


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner and the name that training and all commands use for it.

    Attributes:
        name: name of the planner, such as "epp" or "packing".
        draft: function that returns the plan of a batch as arrays.
        compared: whether ``compare`` shows the planner by default.
        takes: function that returns whether the planner supports a placement of stages on ranks.
        placements: description of the supported placements, for error messages.
        searches: whether the planner searches for a plan that fits in memory. For other planners, a
            plan that does not fit is a result, not an error.
        takes_prefixes: whether the planner computes shared prefixes once.

    Example::

        planned = PLANNERS["epp"](lengths, cost, Options(context=65536))
        print(planned.seconds, planned.plan)
    """

    name: str
    draft: Callable[[SortedBatch, Cost, Options], ScoredDraft | None]
    compared: bool = True
    takes: Callable[[Place], bool] = any_place
    placements: str = "any"
    searches: bool = False
    takes_prefixes: bool = False

    def __call__(self, lengths: Sequence[int], cost: Cost, options: Options) -> PlannedReplica:
        """Plan one replica's documents; see :meth:`plan_block` and :meth:`require_fit`."""
        block = self.plan_block(lengths, cost, options)
        self.require_fit(block, cost)
        (planned,) = block.planned
        return planned

    def require_fit(self, block: PlannedBlock, cost: Cost) -> None:
        """Raise a PlanError if the planner searches, and a plan of ``block`` does not fit."""
        for each in block.planned:
            if self.searches and not each.fits:
                raise no_plan_fits(cost, each.plan.documents, each.peak_bytes)

    def require_place(self, place: Place) -> None:
        """Raise a ValueError if the planner does not support ``place``, the rank of every stage."""
        if not self.takes(place):
            raise ValueError(
                f"planner {self.name!r} does not plan stages on ranks "
                f"{' '.join(map(str, place))}; expected the placement {self.placements}"
            )

    def plan_block(self, lengths: Sequence[int], cost: Cost, options: Options) -> PlannedBlock:
        """Assign documents to the ``options.lockstep`` replicas of a lockstep group, and plan them.

        Raises:
            PlanError: if a document alone does not fit in memory.
            ValueError: if the planner does not support the placement, there are no documents, or a
                length is less than 1.
        """
        return self._planned(SortedBatch.of(lengths), lengths, cost, options)

    def plan_forest(self, forest: PrefixForest, cost: Cost, options: Options) -> PlannedBlock:
        """Plan the sequences of ``forest`` as :meth:`plan_block` does, but compute prefixes once.

        Every replica of a lockstep group computes the shared prefixes of its own sequences once. If
        the result would be slower, or if this planner does not support shared prefixes, sequences
        are planned without sharing.

        Raises:
            PlanError: if a sequence alone does not fit in memory.
            ValueError: if the planner does not support the placement.
        """
        apart = partial(self.plan_block, forest.lengths, cost, options)
        if not (forest.shares and self.takes_prefixes):
            return apart()
        rates, width = rates_of(cost), options.lockstep
        held = divided_trees(forest, rates, width)
        forests = [forest] if width == 1 else [forest.of(each) for each in held]
        trees = [
            tree_seconds([n.tokens for n in each.nodes], [n.parent for n in each.nodes], rates)
            for each in forests
        ]
        shared = self._planned(SortedBatch.of_trees(trees), forest.lengths, cost, options)
        shared = PlannedBlock(held, shared.planned, tuple(each.last for each in forests))
        lengths = np.array(forest.lengths)
        bound = lower_bound_seconds(lengths, cost, local=True) / width
        if shared.rank <= (False, bound):
            return shared
        return min(shared, apart(), key=lambda each: each.rank)

    def _planned(
        self, batch: SortedBatch, lengths: Sequence[int], cost: Cost, options: Options
    ) -> PlannedBlock:
        began = time.perf_counter()
        self.require_place(cost.layout.placement.place)
        require_fit(cost, tuple(map(int, lengths)))
        drafted = self.draft(batch, cost, _with_effort(batch, cost, options))
        assert drafted is not None, "nothing was excluded, so there is a draft"
        block = emit_block(self.name, batch, drafted.draft, cost, options)
        took = (time.perf_counter() - began) / options.lockstep
        planned = tuple(dataclasses.replace(each, plan_seconds=took) for each in block.planned)
        return dataclasses.replace(block, planned=planned)


def _with_effort(batch: SortedBatch, cost: Cost, options: Options) -> Options:
    """Return ``options`` with an effort for the batch.

    If the user set no effort, a lockstep group of n replicas gets n times one replica's effort.
    """
    seconds = batch.work_seconds(rates_of(cost)) * cost.layout.stages_per_rank
    chosen = with_effort(
        options, len(batch.lengths) // options.lockstep, seconds / options.lockstep
    )
    if options.effort is not None or options.lockstep == 1:
        return chosen
    return dataclasses.replace(chosen, effort=(chosen.effort or 0) * options.lockstep)


_ROWS = (
    Planner("epp", epp.draft, searches=True, takes_prefixes=True),
    Planner(
        *("infinipipe", infinipipe.draft),
        takes=schedules.one_stage_a_rank,
        placements="one stage a rank",
    ),
    *(
        Planner(row.name, row.draft, row.compared, row.takes, row.placements)
        for row in schedules.ROWS
    ),
)
PLANNERS: Mapping[str, Planner] = {row.name: row for row in _ROWS}
COMPARED = tuple(row.name for row in _ROWS if row.compared)
# Methods without a pipeline, in `compare` and in a checkout only (scripts/bench).
COMPARISON_METHODS = ("flexsp", "megatron-hybrid-cp")
# Planner of documents packed to the context, and the baseline of `compare` and `tune`: the fastest
# of Megatron's own schedules (planner.stock).
PACKED, STOCK = "packing", "stock"


def planner_of(name: str) -> Planner:
    """Return the planner called ``name``.

    Raises:
        ValueError: if the name is unknown, or is that of a baseline that makes no plan.
    """
    if name == "packing-overlap":
        raise ValueError(f"planner {name!r} is part of {STOCK!r} now, the baseline of compare")
    if name == STOCK:
        raise ValueError(
            f"planner {name!r} is the baseline of compare, which Megatron runs without --epp; "
            f"expected one of {', '.join(COMPARED)}"
        )
    if name in COMPARISON_METHODS:
        raise ValueError(
            f"planner {name!r} makes no pipeline plan, so nothing can run it; "
            f"expected one of {', '.join(COMPARED)}"
        )
    if name not in PLANNERS:
        raise ValueError(unknown_name("planner", name, PLANNERS))
    return PLANNERS[name]
