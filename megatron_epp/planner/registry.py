"""The planners by name, in one table.

A planner is a function ``draft(batch, cost, options)``; what is alike for all of them is here: the
batch is sorted, a document that fits no plan is refused, the draft is checked, played and timed.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_epp.cost.catalogue.named import unknown_name
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.overlap import overlapped
from megatron_epp.planner.epp import planner as epp
from megatron_epp.planner.feasibility import require_fit
from megatron_epp.planner.options import Options, with_effort
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.emit_block import PlannedBlock, emit_block
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.published import (
    adaptis,
    chunkflow,
    one_f_one_b,
    packing,
    packing_best,
    seq1f1b,
    slimpipe,
    zb_v,
)
from megatron_epp.planner.published.infinipipe import planner as infinipipe
from megatron_epp.planner.recompute.uniform import ScoredDraft
from megatron_epp.planner.result import PlannedReplica

Place = tuple[int, ...]  # the rank of every stage


def _any_place(place: Place) -> bool:
    return True


def _one_stage_a_rank(place: Place) -> bool:
    return place == tuple(range(len(place)))


@dataclass(frozen=True, slots=True)
class Planner:
    """A row of the table: a planner whose plans training, ``plan``, ``compare``, ``tune``,
    ``simulate`` and ``serve`` run under this name.

    draft          a plan as arrays for a batch; None only where a bound on seconds was given
    whole          whether it can leave every document whole
    compared       whether ``compare`` shows it unasked
    takes          whether it plans stages on these ranks
    placements     in words, what it takes
    """

    name: str
    draft: Callable[[SortedBatch, Cost, Options], ScoredDraft | None]
    whole: bool = False
    compared: bool = True
    takes: Callable[[Place], bool] = _any_place
    placements: str = "any"

    def __call__(self, lengths: Sequence[int], cost: Cost, options: Options) -> PlannedReplica:
        """Plan one replica's documents; as :meth:`plan_block`."""
        (planned,) = self.plan_block(lengths, cost, options).planned
        return planned

    def require_place(self, place: Place) -> None:
        """Raise a ValueError where the planner does not plan stages on these ranks."""
        if not self.takes(place):
            raise ValueError(
                f"planner {self.name!r} does not plan stages on ranks "
                f"{' '.join(map(str, place))}; expected the placement {self.placements}"
            )

    def plan_block(self, lengths: Sequence[int], cost: Cost, options: Options) -> PlannedBlock:
        """Plan the documents of the replicas of a block (``options.lockstep``), dealt to them.

        Raises:
            PlanError: a document fits no plan.
            ValueError: the planner does not plan stages on these ranks.
        """
        began = time.perf_counter()
        self.require_place(cost.layout.placement.place)
        batch = SortedBatch.of(lengths)
        require_fit(cost, batch.documents)
        drafted = self.draft(batch, cost, _with_effort(batch, cost, options))
        assert drafted is not None, "nothing was excluded, so there is a draft"
        block = emit_block(self.name, batch, drafted.draft, drafted.cost, options)
        took = (time.perf_counter() - began) / options.lockstep
        planned = tuple(dataclasses.replace(each, plan_seconds=took) for each in block.planned)
        return dataclasses.replace(block, planned=planned)


def _with_effort(batch: SortedBatch, cost: Cost, options: Options) -> Options:
    """``options`` with an effort for the batch; for a block as much as for each of its replicas."""
    seconds = float(rates_of(cost).document_seconds(batch.lengths).sum())
    chosen = with_effort(
        options, len(batch.lengths) // options.lockstep, seconds / options.lockstep
    )
    if options.effort is not None or options.lockstep == 1:
        return chosen
    return dataclasses.replace(chosen, effort=(chosen.effort or 0) * options.lockstep)


_EVEN = "one stage a rank"
_INTERLEAVED = f"{_EVEN}, or interleaved N"
_ROWS = (
    Planner("epp", epp.draft, whole=True),
    Planner("infinipipe", infinipipe.draft, takes=_one_stage_a_rank, placements=_EVEN),
    Planner("seq1f1b", seq1f1b.draft),
    Planner("chunkflow", chunkflow.draft),
    Planner("packing", packing.draft, whole=True),
    Planner("packing-best", packing_best.draft, whole=True),
    Planner("1f1b", one_f_one_b.draft, True, False, one_f_one_b.is_interleaved, _INTERLEAVED),
    Planner("zb-v", zb_v.draft, True, False, zb_v.is_v, "v"),
    Planner("adaptis", adaptis.draft, True, False),
    Planner("slimpipe", slimpipe.draft, False, False),
)
PLANNERS: Mapping[str, Planner] = {row.name: row for row in _ROWS}
COMPARED = tuple(row.name for row in _ROWS if row.compared)
# Methods without a pipeline, which `compare` alone knows, in a checkout (scripts/bench).
COMPARISON_METHODS = ("flexsp", "megatron-hybrid-cp")
# The baselines: documents packed to the context; to the best length of each batch; and the latter
# where Megatron hides a part of the exchanges (cost.overlap): `compare` and `tune` alone know it.
PACKED, STOCK, OVERLAPPED = "packing", "packing-best", "packing-overlap"


def planner_and_cost(name: str, cost: Cost) -> tuple[str, Cost]:
    """Return the planner that makes the plans of a row of ``compare`` or ``tune``, and its cost."""
    return (STOCK, overlapped(cost)) if name == OVERLAPPED else (name, cost)


def planner_of(name: str, full_documents: bool = False) -> Planner:
    """The planner called ``name``; a ValueError with the near matches where there is none, or
    where it makes no pipeline plan, or none with ``full_documents`` documents where that is
    asked."""
    if name == OVERLAPPED:
        raise ValueError(
            f"planner {name!r} is a baseline with Megatron's own overlaps, with which no plan "
            f"runs; expected one of {', '.join(COMPARED)}"
        )
    if name in COMPARISON_METHODS:
        raise ValueError(
            f"planner {name!r} makes no pipeline plan, so nothing can run it; "
            f"expected one of {', '.join(COMPARED)}"
        )
    if name not in PLANNERS:
        raise ValueError(unknown_name("planner", name, PLANNERS))
    if full_documents and not PLANNERS[name].whole:
        able = ", ".join(row.name for row in _ROWS if row.whole)
        raise ValueError(
            f"planner {name!r} cuts documents, which must stay whole here; expected one of {able}"
        )
    return PLANNERS[name]
