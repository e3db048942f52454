"""Division of a global batch over data-parallel replicas, with a plan for each replica."""

import dataclasses
import hashlib
import heapq
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from megatron_epp.corpus.shared_prefixes import Batch, PrefixForest, lengths_of
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Chunk, Plan, Step, StepPart
from megatron_epp.planner.chunks.local import first_local
from megatron_epp.planner.chunks.slicing import ideal_chunks
from megatron_epp.planner.epp.planner import can_be_local
from megatron_epp.planner.epp.search import LOCAL
from megatron_epp.planner.evaluation import evaluation_plans
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import MOST_EFFORT, Options
from megatron_epp.planner.order.emit_block import PlannedBlock
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.registry import planner_of
from megatron_epp.planner.result import PlannedStep
from megatron_epp.planner.runner import Runner, in_turn
from megatron_epp.planner.tree_division import Assignments, divided_trees

# Up to BALANCED_TWICE replicas are balanced a second time, with the times of the first plans, if
# the replicas' end times differ by more than APART of the iteration. Every planner process then
# plans for all replicas. More replicas are balanced once, by their documents, and each process
# plans for one replica. A second round saved nothing on 15 of 21 batches, and at most 3.5%, for
# twice the planning time.
BALANCED_TWICE = 3
APART = 0.01


def balance_replicas(
    lengths: Sequence[int],
    cost: Cost,
    replicas: int,
    overhead: Sequence[float] | None = None,
    least: int = 1,
    seconds: np.ndarray | None = None,
    most: int | None = None,
) -> Assignments:
    """Assign documents to replicas: longest first, each to the replica with the least work so far.

    Args:
        lengths: document lengths of the batch in tokens.
        cost: cost model, including the stages and parallel degrees.
        replicas: number of replicas.
        overhead: for every replica, the seconds of its plan that are not work of its documents;
            None: 0.
        least: minimum number of documents of a replica. The longest documents are first assigned
            round-robin, until every replica has this number.
        seconds: [documents] seconds of work of every document; default: the work if documents are
            sharded over all context-parallel ranks.
        most: maximum number of documents of a replica, at least ``len(lengths) / replicas``; None
            for no limit.

    Returns:
        For every replica, the indices of its documents, in the order of the batch.

    Raises:
        ValueError: if ``replicas`` is less than 1, or there are fewer than ``least`` documents per
            replica.
    """
    documents = len(lengths)
    if not min(1, least) <= replicas * least <= documents:
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
    # The longest documents are assigned round-robin, so that no replica stays empty.
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


def balance_blocks(
    lengths: Sequence[int],
    cost: Cost,
    blocks: int,
    lockstep: int,
    overhead: Sequence[float] | None = None,
    seconds: np.ndarray | None = None,
) -> Assignments:
    """Assign documents to ``blocks`` lockstep groups of ``lockstep`` replicas each, by time.

    If there are enough documents, a block (lockstep group) gets at least one for each of its
    replicas.

    Args:
        lengths: document lengths of the batch in tokens.
        cost: cost model, including the stages and parallel degrees.
        blocks: number of blocks.
        lockstep: number of replicas of a block.
        overhead: for every block, the seconds of its plan that are not work of its documents;
            None: 0.
        seconds: [documents] seconds of work of every document; None as in
            :func:`balance_replicas`.

    Returns:
        For every block, the indices of its documents, in the order of the batch.
    """
    least = lockstep if len(lengths) >= blocks * lockstep else 0
    return balance_replicas(lengths, cost, blocks, overhead, least, seconds)


def plan_step(
    batch: Batch,
    cost: Cost,
    options: Options,
    planner: str = "epp",
    replicas: int = 1,
    run: Runner = in_turn,
) -> PlannedStep:
    """Assign documents to replicas by time, and plan each replica.

    Replicas in lockstep (``options.lockstep``) are planned together: documents are balanced over
    lockstep groups. Within a group, chunks that run at the same time should take equally long.

    Args:
        batch: document lengths of the global batch in tokens, or documents with shared prefixes. A
            replica computes a shared prefix once if the planner supports this and it saves time.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.
        planner: name of the planner.
        replicas: number of replicas.
        run: function that maps a function over tasks, for example in worker processes.

    Raises:
        PlanError: if there are no documents, a document alone does not fit in memory, or planner
            `epp` finds no plan that fits.
        ValueError: if the planner is unknown or does not support the placement, ``replicas`` is
            less than 1 or not a multiple of the size of a lockstep group, or a length is less than
            1.
    """
    began = time.perf_counter()
    assigned, blocks = _planned(batch, cost, options, replicas, planner, run)
    for block in blocks:
        planner_of(planner).require_fit(block, cost)
    numbered = {
        number: (block.assignments, [replica_plan.plan for replica_plan in block.planned])
        for number, block in enumerate(blocks)
    }
    ends = {number: block.ends for number, block in enumerate(blocks)}
    step = Step.of_parts(_parts(assigned, numbered, replicas, ends))
    named = (
        dataclasses.replace(replica_plan, plan=plan)
        for replica_plan, plan in zip(
            (replica_plan for block in blocks for replica_plan in block.planned),
            step.plans,
            strict=True,
        )
    )
    return PlannedStep(step, tuple(named), time.perf_counter() - began)


def plan_part(
    batch: Batch,
    cost: Cost,
    options: Options,
    planner: str,
    replicas: int,
    replica: int,
    stands_in_for: str | None = None,
) -> StepPart:
    """Return the part of :func:`plan_step`'s result for the lockstep group of ``replica``.

    Unlike :func:`plan_step`, this function accepts a batch without documents, and may not check the
    documents of other groups.

    Args:
        batch: documents of the global batch, which is divided over all replicas.
        cost: cost model, the same for all replicas.
        options: planner options, the same for all replicas.
        planner: name of the planner.
        replicas: number of replicas of the job.
        replica: index of the replica.
        stands_in_for: name of the planner of the other replicas, if this replica uses ``planner``
            instead; it determines the division of documents. None: ``planner``.

    Raises:
        PlanError: as :func:`plan_step`.
        ValueError: as :func:`plan_step`.
    """
    block = replica // options.lockstep
    others, units = stands_in_for or planner, replicas // options.lockstep
    if _balanced_twice(units, options):
        assigned, blocks = _planned(batch, cost, options, replicas, others)
    else:
        assigned, blocks = divide_documents(batch, cost, options, replicas, others), []
    if blocks and others == planner:
        planned = blocks[block]
    else:
        planned = plan_block(planner, _part_of(batch, assigned[block]), cost, options)
    planner_of(planner).require_fit(planned, cost)
    plans = [replica_plan.plan for replica_plan in planned.planned]
    ends = {block: planned.ends}
    (part,) = _parts(assigned, {block: (planned.assignments, plans)}, replicas, ends)
    return part


def _part_of(batch: Batch, documents: Sequence[int]) -> Batch:
    if isinstance(batch, PrefixForest):
        return batch.of(documents)
    return [batch[document] for document in documents]


def divide_documents(
    batch: Batch, cost: Cost, options: Options, replicas: int, planner: str
) -> Assignments:
    """Return the document indices of every lockstep group (one replica if not in lockstep).

    The result depends only on the arguments, so that every planner process computes the same
    division. For few replicas, :func:`_planned` refines the division.

    Args:
        batch: document lengths of the global batch in tokens, or documents with shared prefixes.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, including the number of replicas per lockstep group.
        replicas: number of replicas.
        planner: name of the planner; "" for evaluation.

    Raises:
        ValueError: if ``replicas`` is less than 1 or not a multiple of the size of a lockstep
            group, or the planner is unknown.
    """
    width, lengths = options.lockstep, lengths_of(batch)
    if replicas % width:
        raise ValueError(f"lockstep {width}: expected a divisor of the {replicas} replicas")
    computes_once = planner and planner_of(planner).takes_prefixes and replicas <= len(lengths)
    if isinstance(batch, PrefixForest) and batch.shares and computes_once:
        held = divided_trees(batch, rates_of(cost), replicas)
        groups = (held[first : first + width] for first in range(0, replicas, width))
        return tuple(tuple(sorted(chain(*group))) for group in groups)
    seconds = _document_seconds(lengths, cost, options, replicas // width, planner)
    return balance_blocks(lengths, cost, replicas // width, width, None, seconds)


def _document_seconds(
    lengths: Sequence[int], cost: Cost, options: Options, units: int, planner: str
) -> np.ndarray | None:
    """Return the seconds of each document for ``planner``; None: the default seconds.

    If planner `epp` will probably assign a document to one context-parallel rank, the document's
    seconds do not include all-to-all.
    """
    local = planner == "epp" and can_be_local(cost, options)
    if units <= BALANCED_TWICE or not local:
        return None
    rates, inputs = rates_of(cost), np.asarray(lengths, dtype=np.int64)
    seconds, longest_first = rates.document_seconds(inputs), np.sort(inputs)[::-1]
    chunks = units * ideal_chunks(float(seconds.sum()) / units, rates, cost.layout.stages)
    first, _ = first_local(longest_first, chunks, LOCAL, rates, math.inf, cost.layout.cp)
    longest = longest_first[first] if first < len(inputs) else 0
    return seconds - rates.exchange_seconds * inputs * (inputs <= longest)


def _parts(
    assigned: Assignments,
    blocks: Mapping[int, tuple[Assignments, Sequence[Plan]]],
    replicas: int,
    ends: Mapping[int, Assignments] | None = None,
) -> list[StepPart]:
    """Return the step parts (documents and plans of replicas) of some lockstep groups.

    Keys of ``blocks`` are indices of lockstep groups. A value contains the documents of each
    replica of the group, as indices into the group's documents, and the plan of each replica.
    ``ends`` contains the ends of documents in the plans, as in ``ir.Step``.
    """
    division = hashlib.sha256(repr(assigned).encode()).hexdigest()[:16]
    return [
        StepPart(
            tuple(tuple(assigned[block][document] for document in held) for held in within),
            tuple(
                dataclasses.replace(plan, replica=replica, replicas=replicas)
                for replica, plan in enumerate(plans, block * len(plans))
            ),
            division,
            ends[block] if ends else (),
        )
        for block, (within, plans) in blocks.items()
    ]


def plan_block(planner: str, batch: Batch, cost: Cost, options: Options) -> PlannedBlock:
    """Plan the documents of one replica or of one lockstep group.

    A lockstep group of n replicas gets n times the effort of one replica, up to MOST_EFFORT.

    Args:
        planner: name of the planner.
        batch: document lengths of the replica or group in tokens, or documents with shared
            prefixes.
        cost: cost model, including the stages and parallel degrees.
        options: planner options, such as levers and effort.

    Raises:
        PlanError: if a document alone does not fit in memory.
        ValueError: if the planner is unknown or does not support the placement, or a length is less
            than 1.
    """
    if options.effort is not None:
        effort = min(options.effort * options.lockstep, MOST_EFFORT)
        options = dataclasses.replace(options, effort=effort)
    row, lengths = planner_of(planner), lengths_of(batch)
    if isinstance(batch, PrefixForest) and len(lengths) >= options.lockstep:
        return row.plan_forest(batch, cost, options)
    block = row.plan_block(_with_stand_ins(lengths, options), cost, options)
    if len(lengths) >= options.lockstep:
        return block
    plans = [replica_plan.plan for replica_plan in block.planned]
    assignments, plans = _without_stand_ins(block.assignments, plans, len(lengths))
    planned = (
        dataclasses.replace(replica_plan, plan=own)
        for replica_plan, own in zip(block.planned, plans, strict=True)
    )
    return PlannedBlock(assignments, tuple(planned))


def _with_stand_ins(lengths: Sequence[int], options: Options) -> list[int]:
    """Return ``lengths``, plus a document of one token for each replica that would have none.

    Planners require at least one document per replica. An empty chunk takes about as long as a
    chunk of one token.
    """
    return [*lengths, *[1] * (options.lockstep - len(lengths))]


def _without_stand_ins(
    assignments: Assignments, plans: Sequence[Plan], documents: int
) -> tuple[Assignments, list[Plan]]:
    """Return assignments and plans with only the first ``documents`` documents.

    Chunks of removed documents stay in the plan; they may be empty.
    """
    if documents >= len(plans):
        return assignments, list(plans)
    kept = [sum(document < documents for document in held) for held in assignments]
    return tuple(held[:count] for held, count in zip(assignments, kept, strict=True)), [
        dataclasses.replace(
            plan,
            documents=plan.documents[:count],
            chunks=tuple(
                Chunk(tuple(span for span in chunk.spans if span.document < count))
                for chunk in plan.chunks
            ),
        )
        for plan, count in zip(plans, kept, strict=True)
    ]


def _balanced_twice(units: int, options: Options) -> bool:
    return 1 < units <= BALANCED_TWICE and options.effort != 0


def _planned(
    batch: Batch,
    cost: Cost,
    options: Options,
    replicas: int,
    planner: str,
    run: Runner = in_turn,
) -> tuple[Assignments, list[PlannedBlock]]:
    """Return the documents of every lockstep group, and the groups' plans.

    If there are at most BALANCED_TWICE groups, and their times differ or a plan does not fit,
    documents are assigned again with the times of the first plans. A group whose plan does not fit
    then keeps only its longest documents, one a replica, as far as the other groups have time. The
    better division is returned.
    """
    width = options.lockstep
    units = replicas // width

    def planned(assigned: Assignments) -> list[PlannedBlock]:
        tasks = [(planner, _part_of(batch, held), cost, options) for held in assigned]
        return list(run(plan_block, tasks))

    assigned = divide_documents(batch, cost, options, replicas, planner)
    blocks = planned(assigned)
    if any(block.ends for block in blocks):
        bound = lower_bound_seconds(np.array(lengths_of(batch)), cost, local=True) / replicas
        if _slowest(blocks) <= (False, bound) or not _balanced_twice(units, options):
            return assigned, blocks
        unshared = _planned(lengths_of(batch), cost, options, replicas, planner, run)
        return min((assigned, blocks), unshared, key=lambda each: _slowest(each[1]))
    ends = [block.planned[0].seconds for block in blocks]
    fits = [all(each.fits for each in block.planned) for block in blocks]
    apart = max(ends) - min(ends) > APART * max(ends) or not all(fits)
    if not apart or not _balanced_twice(units, options):
        return assigned, blocks
    lengths = lengths_of(batch)
    rates, inputs = rates_of(cost), np.asarray(lengths, dtype=np.int64)
    # Documents on one context-parallel rank have no exchange time.
    local = _local(assigned, blocks, len(lengths))
    seconds = rates.document_seconds(inputs) - rates.exchange_seconds * inputs * local
    seconds *= cost.layout.stages_per_rank
    everything = float(seconds.sum())
    overhead = [
        end * width - float(seconds[list(held)].sum()) if fit else everything
        for held, end, fit in zip(assigned, ends, fits, strict=True)
    ]
    again = balance_blocks(lengths, cost, units, width, overhead, seconds)
    if again == assigned:
        return assigned, blocks
    return min((assigned, blocks), (again, planned(again)), key=lambda each: _slowest(each[1]))


def _local(assigned: Assignments, blocks: Sequence[PlannedBlock], documents: int) -> np.ndarray:
    """Return, for each document, whether one context-parallel rank computes it alone."""
    local = np.zeros(documents, dtype=bool)
    for held, block in zip(assigned, blocks, strict=True):
        for within, replica_plan in zip(block.assignments, block.planned, strict=True):
            spans = (span for chunk in replica_plan.plan.chunks for span in chunk.spans)
            local[[held[within[span.document]] for span in spans if span.local]] = True
    return local


def evaluation_step(
    lengths: Sequence[int], cost: Cost, options: Options, replicas: int, most: int | None = None
) -> Step:
    """Return a forward-only step: documents and a forward-only plan for every replica.

    Args:
        lengths: document lengths of the global batch in tokens.
        cost: cost model, including the stages and parallel degrees.
        options: planner options; only ``lockstep`` matters.
        replicas: number of replicas.
        most: maximum number of tokens of a chunk; None if only memory limits it.

    Raises:
        PlanError: if there are no documents, or a document does not fit in memory, even in the
            smallest slices.
        ValueError: if ``replicas`` is less than 1 or not a multiple of the size of a lockstep
            group, or a length is less than 1.
    """
    every = range(replicas // options.lockstep)
    return Step.of_parts(_evaluation_parts(lengths, cost, options, replicas, every, most))


def evaluation_part(
    lengths: Sequence[int],
    cost: Cost,
    options: Options,
    replicas: int,
    replica: int,
    most: int | None = None,
) -> StepPart:
    """Return the part of :func:`evaluation_step`'s result for the lockstep group of ``replica``.

    ``replica`` is an index. Other arguments and errors are those of :func:`evaluation_step`, but
    this function accepts a batch without documents, and checks only the group's documents.
    """
    block = replica // options.lockstep
    (part,) = _evaluation_parts(lengths, cost, options, replicas, (block,), most)
    return part


def _evaluation_parts(
    lengths: Sequence[int],
    cost: Cost,
    options: Options,
    replicas: int,
    blocks: Iterable[int],
    most: int | None,
) -> list[StepPart]:
    assigned = divide_documents(lengths, cost, options, replicas, "")
    planned = {}
    for block in blocks:
        held = [lengths[document] for document in assigned[block]]
        stood_in = evaluation_plans(_with_stand_ins(held, options), cost, options, most)
        planned[block] = _without_stand_ins(*stood_in, len(held))
    return _parts(assigned, planned, replicas)


def _slowest(blocks: Sequence[PlannedBlock]) -> tuple[bool, float]:
    ranks = [block.rank for block in blocks]
    return any(unfit for unfit, _ in ranks), max(seconds for _, seconds in ranks)
