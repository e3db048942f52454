"""Balance the documents of a global batch over data-parallel replicas, and plan each."""

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import PlanError, Step
from megatron_epp.planner.evaluation import evaluation_plans
from megatron_epp.planner.options import MOST_EFFORT, Options
from megatron_epp.planner.order.emit_block import PlannedBlock
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.registry import planner_of
from megatron_epp.planner.result import PlannedReplica, PlannedStep

# At most this many rounds of balancing, each but the first with what the plans before it took, and
# only where replicas end further apart than this share of the iteration. Chosen by hand, on batches
# that are not recorded.
BALANCING_ROUNDS = 2
APART = 0.01
Assignments = tuple[tuple[int, ...], ...]  # documents of every replica
BlockFunction = Callable[[Sequence[int], Cost, Options], PlannedBlock]


def balance_replicas(
    lengths: Sequence[int],
    cost: Cost,
    replicas: int,
    overhead: Sequence[float] | None = None,
    least: int = 1,
    seconds: np.ndarray | None = None,
    most: int | None = None,
) -> Assignments:
    """Give every document to a replica: longest first, each to the replica that is done first.

    Returns the documents of every replica, in the order of the batch; at least ``least`` each, and
    at most ``most`` (None: as many as it comes to).

    overhead   per replica, seconds that its plan takes beside its documents' own work
    seconds    of every document's own work; None: as of one that all context-parallel ranks share
    """
    documents = len(lengths)
    if not 1 <= replicas * least <= documents:
        raise ValueError(
            f"{documents} documents for {replicas * least} replicas: expected at least one for "
            "each; raise the global batch size or lower the data-parallel degree"
        )
    if seconds is None:
        seconds = rates_of(cost).document_seconds(np.asarray(lengths, dtype=np.int64))
    own = seconds.tolist()
    order = sorted(range(documents), key=lambda d: -lengths[d])
    start = [0.0] * replicas if overhead is None else list(overhead)
    assignments: list[list[int]] = [[] for _ in range(replicas)]
    # The longest documents go one to each, so that no replica stays empty.
    for number, document in enumerate(order[: replicas * least]):
        replica = number % replicas
        assignments[replica].append(document)
        start[replica] += own[document]
    free_places = [documents if most is None else most - least] * replicas
    heap = [(taken, replica) for replica, taken in enumerate(start) if free_places[replica]]
    heapq.heapify(heap)
    for document in order[replicas * least :]:
        taken, replica = heapq.heappop(heap)
        assignments[replica].append(document)
        free_places[replica] -= 1
        if free_places[replica]:
            heapq.heappush(heap, (taken + own[document], replica))
    return tuple(tuple(sorted(held)) for held in assignments)


def plan_step(
    lengths: Sequence[int], cost: Cost, options: Options, planner: str = "epp", replicas: int = 1
) -> PlannedStep:
    """Balance documents over ``replicas``, and plan each by the planner of that name.

    Where replicas end apart, documents are balanced once more, now knowing what each replica's plan
    takes beside the work itself; the balance whose slowest replica is fastest is kept. All replicas
    have the same layers on a stage: where they are open and the replicas' plans want different
    ones, those of the slowest replica and those of ``cost`` are planned with.

    Replicas in lockstep (``options.lockstep``) are planned together, block by block: documents are
    balanced over the blocks, and within a block dealt so that chunks at one position are alike.
    """
    began = time.perf_counter()
    plan = _unit_planner(planner, options.whole)
    lengths = tuple(lengths)
    _require_blocks(replicas, options)
    assignments, planned = _planned(lengths, cost, options, plan, replicas)
    if len({replica_plan.plan.layers for replica_plan in planned}) > 1:
        slowest = max(
            planned, key=lambda replica_plan: (not replica_plan.fits, replica_plan.seconds)
        )
        layers = dict.fromkeys((slowest.plan.layers, cost.layout.layers))
        assignments, planned = _with_layers(lengths, cost, options, plan, replicas, layers)
    named = tuple(
        dataclasses.replace(
            replica_plan,
            plan=dataclasses.replace(replica_plan.plan, replica=replica, replicas=replicas),
        )
        for replica, replica_plan in enumerate(planned)
    )
    step = Step(assignments, tuple(replica_plan.plan for replica_plan in named), options.lockstep)
    return PlannedStep(step, named, time.perf_counter() - began)


def _require_blocks(replicas: int, options: Options) -> None:
    if replicas % options.lockstep:
        raise ValueError(
            f"lockstep {options.lockstep}: expected a divisor of the {replicas} replicas"
        )


def _unit_planner(planner: str, full_documents: bool) -> BlockFunction:
    """The function that plans the documents of one unit: of a replica, or of a block in lockstep,
    for which it may look as hard as for each of its replicas."""
    row = planner_of(planner, full_documents)

    def plan(lengths: Sequence[int], cost: Cost, options: Options) -> PlannedBlock:
        if options.effort is not None:
            effort = min(options.effort * options.lockstep, MOST_EFFORT)
            options = dataclasses.replace(options, effort=effort)
        return row.plan_block(lengths, cost, options)

    return plan


def _with_layers(
    lengths: tuple[int, ...],
    cost: Cost,
    options: Options,
    plan: BlockFunction,
    replicas: int,
    layers: Iterable[tuple[int, ...]],
) -> tuple[Assignments, tuple[PlannedReplica, ...]]:
    """The best of the ``layers`` of stages, each planned with for all replicas."""
    closed = dataclasses.replace(options, open_layers=False)
    results, reasons = [], []
    for each in layers:
        fixed = cost.replace(layers=each)
        try:
            results.append(_planned(lengths, fixed, closed, plan, replicas))
        except PlanError as error:  # a replica whose documents fit only with other layers
            reasons.append(error)
    if not results:
        raise reasons[0]
    return min(results, key=lambda divided: _slowest(divided[1]))


def _planned(
    lengths: tuple[int, ...], cost: Cost, options: Options, plan: BlockFunction, replicas: int
) -> tuple[Assignments, tuple[PlannedReplica, ...]]:
    """The balance whose slowest replica is fastest, and every replica's plan."""
    rates, width = rates_of(cost), options.lockstep
    units = replicas // width
    inputs = np.asarray(lengths, dtype=np.int64)
    seconds = document_seconds = rates.document_seconds(inputs)
    best: tuple[Assignments, tuple[PlannedReplica, ...]] | None = None
    overhead: list[float] | None = None
    seen: Assignments | None = None
    for _ in range(BALANCING_ROUNDS if units > 1 and options.effort != 0 else 1):
        assigned = balance_replicas(lengths, cost, units, overhead, width, seconds)
        if assigned == seen:
            break
        seen = assigned
        blocks = [
            plan([lengths[document] for document in held], cost, options) for held in assigned
        ]
        planned = tuple(replica_plan for block in blocks for replica_plan in block.planned)
        assignments = _renamed(assigned, [block.assignments for block in blocks])
        if best is None or _slowest(planned) < _slowest(best[1]):
            best = assignments, planned
        ends = [block.planned[0].seconds for block in blocks]
        if max(ends) - min(ends) <= APART * max(ends):
            break
        # Documents local to a context-parallel rank exchange nothing.
        seconds = document_seconds - rates.exchange_seconds * inputs * _local(
            assignments, planned, len(lengths)
        )
        overhead = [
            end * width - float(seconds[list(held)].sum())
            for held, end in zip(assigned, ends, strict=True)
        ]
    assert best is not None
    return best


def _local(
    assignments: Assignments, planned: Sequence[PlannedReplica], documents: int
) -> np.ndarray:
    """[documents]: whether one context-parallel rank computes the document alone."""
    local = np.zeros(documents, dtype=bool)
    for held, replica_plan in zip(assignments, planned, strict=True):
        spans = (span for chunk in replica_plan.plan.chunks for span in chunk.spans)
        local[[held[span.document] for span in spans if span.local]] = True
    return local


def _renamed(assigned: Assignments, within: Sequence[Assignments]) -> Assignments:
    """Documents of every replica by their numbers in the batch; ``within``: of each unit's replicas
    by those among its own."""
    return tuple(
        tuple(held[document] for document in assignment)
        for held, assignments in zip(assigned, within, strict=True)
        for assignment in assignments
    )


def evaluation_step(
    lengths: Sequence[int], cost: Cost, options: Options, replicas: int, most: int | None = None
) -> Step:
    """A step of forwards alone: documents balanced, every replica's evaluation plan; in lockstep
    where ``options`` say so.

    ``most``: tokens of a chunk, None where memory alone decides.
    """
    _require_blocks(replicas, options)
    width = options.lockstep
    assigned = balance_replicas(lengths, cost, replicas // width, least=width)
    results = [
        evaluation_plans([lengths[d] for d in held], cost, options, most) for held in assigned
    ]
    plans = (plan for _, plans in results for plan in plans)
    return Step(
        _renamed(assigned, [assignments for assignments, _ in results]),
        tuple(
            dataclasses.replace(plan, replica=replica, replicas=replicas)
            for replica, plan in enumerate(plans)
        ),
        width,
    )


def _slowest(planned: Sequence[PlannedReplica]) -> tuple[bool, float]:
    return not all(replica_plan.fits for replica_plan in planned), max(
        replica_plan.seconds for replica_plan in planned
    )
