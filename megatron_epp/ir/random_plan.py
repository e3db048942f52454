"""Random valid plans for certificates (comparisons of gradients) and property tests.

No planner uses everything that the plan language allows; random plans do. They cut documents, pack
and order chunks and recompute layers in every allowed way. An executor that runs random plans
correctly can therefore be expected to run the plans of any planner.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from megatron_epp.ir import (
    FULL,
    KEEP,
    OF_HEAD,
    Chunk,
    Kind,
    Op,
    Plan,
    Prefixes,
    Span,
    needs_of,
    rules_for,
    slices_in,
)
from megatron_epp.ir.recompute import MLP_RECOMPUTED


def arbitrary_plan(
    lengths: Sequence[int],
    layers: Sequence[int],
    random: Random,
    *,
    split_backward: float = 0.0,
    modes: str = KEEP + FULL,
    replica: int = 0,
    replicas: int = 1,
    vocabulary_parallel: bool = False,
    place: Sequence[int] = (),
    alone: bool = False,
    chunks: Sequence[Chunk] = (),
    prefixes: Prefixes = (),
) -> Plan:
    """Return a random valid plan for documents of ``lengths`` tokens.

    The orders come from :func:`random_walk`, over all stages at once. If ``lengths`` is empty, the
    plan has one empty chunk.

    Args:
        lengths: tokens of each document.
        layers: number of layers of each stage.
        random: source of random numbers.
        split_backward: probability that a backward is split into I and W.
        modes: recompute modes from which the mode of each layer is drawn.
        replica: data-parallel rank.
        replicas: data-parallel size.
        vocabulary_parallel: whether the LM head is sharded over the stages (ops H and G).
        place: rank of each stage; empty if stage i is on rank i.
        alone: whether each document is alone in one chunk, uncut. Otherwise about half of the
            documents of 8 tokens or more are cut into two to five slices.
        chunks: the chunks; empty if the function draws them.
        prefixes: the span that each document continues, or None; empty if no document has a prefix.

    Raises:
        PlanError: the arguments do not fit together.
    """
    chunks = tuple(chunks) or arbitrary_chunks(lengths, random, alone=alone) or (Chunk(()),)
    bare = Plan(
        documents=tuple(lengths),
        layers=tuple(layers),
        chunks=chunks,
        recompute=tuple(
            tuple("".join(random.choice(modes) for _ in range(count)) for _ in chunks)
            for count in layers
        ),
        orders=tuple(() for _ in layers),
        replica=replica,
        replicas=replicas,
        prefixes=tuple(prefixes),
    )
    walked = random_walk(bare, random, split_backward, vocabulary_parallel=vocabulary_parallel)
    return placed(replace(bare, orders=by_stage(bare, walked)), place, [s for s, _ in walked])


def placed(plan: Plan, place: Sequence[int], stages: Sequence[int]) -> Plan:
    """Return ``plan`` with stage s on rank ``place[s]``; an empty ``place`` has stage s on rank s.

    ``stages`` lists the stage of every op, in an order in which all ops can run. Each rank runs its
    ops in this order.

    Raises:
        PlanError: ``place`` does not list every rank from 0 on.
    """
    if len(set(place)) in (0, plan.stages):
        return replace(plan, place=tuple(place))
    turns = [tuple(s for s in stages if place[s] == rank) for rank in range(1 + max(place))]
    return replace(plan, place=tuple(place), turns=tuple(turns))


def arbitrary_block(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    random: Random,
    *,
    split_backward: float = 0.0,
    modes: str = KEEP + FULL,
    first: int = 0,
    replicas: int | None = None,
    vocabulary_parallel: bool = False,
    place: Sequence[int] = (),
    trees: Sequence[Mapping[str, Any]] = (),
) -> tuple[Plan, ...]:
    """Return random plans of a lockstep group: one op template, but different chunks.

    The op template (orders, recompute of MLPs) is drawn as in :func:`arbitrary_plan`. Each replica
    first numbers its chunks so that the slices of a document are in order. One random permutation
    then renumbers the chunks of all replicas. A chunk that holds a slice on one replica may hold
    anything on another replica, or be empty.

    Args:
        lengths: tokens of the documents of each replica.
        layers: number of layers of each stage.
        random: source of random numbers.
        split_backward: probability that a backward is split into I and W.
        modes: recompute modes from which the mode of each layer is drawn.
        first: data-parallel rank of the first replica.
        replicas: data-parallel size; default: the size of the group.
        vocabulary_parallel: whether the LM head is sharded over the stages (ops H and G).
        place: rank of each stage; empty if stage i is on rank i.
        trees: for each replica, a dict with arguments ``chunks`` and ``prefixes`` as of
            :func:`arbitrary_plan`, or an empty dict; empty if no replica has them.

    Raises:
        PlanError: the arguments do not fit together.
    """
    trees = trees or [{} for _ in lengths]
    drawn = [
        _parents_first(each, **tree)
        if "chunks" in tree
        else _in_order(arbitrary_chunks(each, random))
        for each, tree in zip(lengths, trees, strict=True)
    ]
    count = max(1, max(map(len, drawn)) + random.randint(0, 1))
    names = random.sample(range(count), count)
    replicas = len(lengths) if replicas is None else replicas
    again = [mode for mode in modes if mode in MLP_RECOMPUTED]
    other = [mode for mode in modes if mode not in MLP_RECOMPUTED]
    runs_again = [
        [[random.choice(modes) in MLP_RECOMPUTED for _ in range(layer)] for _ in range(count)]
        for layer in layers
    ]
    bare = []
    for number, (each, chunks) in enumerate(zip(lengths, drawn, strict=True)):
        places = sorted(random.sample(range(count), len(chunks)))
        placed_chunks = [Chunk(())] * count
        for at, chunk in zip(places, chunks, strict=True):
            placed_chunks[names[at]] = chunk
        choices = tuple(
            tuple(
                "".join(random.choice(again if run else other) for run in of_chunk)
                for of_chunk in of_stage
            )
            for of_stage in runs_again
        )
        orders: tuple[tuple[Op, ...], ...] = tuple(() for _ in layers)
        bare.append(
            Plan(
                tuple(each),
                tuple(layers),
                tuple(placed_chunks),
                choices,
                orders,
                first + number,
                replicas,
                prefixes=tuple(trees[number].get("prefixes", ())),
            )
        )
    rules = rules_for(vocabulary_parallel)
    needs = [needs_of(plan, rules) for plan in bare[1:]]

    def met(stage: int, op: Op, finished: Sequence[set[Op]]) -> bool:
        return all(
            any(one in finished[where] for one in ops)
            for of_replica in needs
            for _, where, ops in of_replica(stage, op)
        )

    walked = random_walk(bare[0], random, split_backward, met, vocabulary_parallel)
    orders, stages = by_stage(bare[0], walked), [stage for stage, _ in walked]
    return tuple(placed(replace(plan, orders=orders), place, stages) for plan in bare)


def with_local(plan: Plan, random: Random, ranks: int) -> Plan:
    """Return ``plan`` with some of its whole documents moved to single context-parallel ranks.

    In each chunk, no document, about half of the documents or all of them move to random ranks
    below ``ranks``. A rank may receive no document. Cut documents, documents with a prefix and
    documents that other documents continue stay sharded.
    """
    tied = {d for d, prefix in enumerate(plan.prefixes) if prefix is not None}
    tied |= {prefix.document for prefix in plan.prefixes if prefix is not None}
    chunks = []
    for chunk in plan.chunks:
        fraction = random.choice((0.0, 0.5, 1.0))
        spans = [
            replace(span, rank=random.randrange(ranks))
            if span.tokens == plan.documents[span.document]
            and span.document not in tied
            and random.random() < fraction
            else span
            for span in chunk.spans
        ]
        chunks.append(Chunk(tuple(spans)))
    return replace(plan, chunks=tuple(chunks))


def _in_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Reorder ``chunks`` so that the slices of every cut document are in document order.

    Chunks with slices of one document exchange their places; all other chunks stay in place.
    """
    starts: dict[int, list[int]] = {}
    for place, chunk in enumerate(chunks):
        for span in chunk.spans:
            starts.setdefault(span.document, []).append(place)
    cut = {document: places for document, places in starts.items() if len(places) > 1}
    ordered = list(chunks)
    for document, places in cut.items():
        slices = [chunks[place] for place in places]
        slices.sort(key=lambda chunk: next(s.start for s in chunk.spans if s.document == document))
        for place, chunk in zip(places, slices, strict=True):
            ordered[place] = chunk
    return ordered


def _parents_first(
    lengths: Sequence[int], chunks: Sequence[Chunk], prefixes: Prefixes
) -> list[Chunk]:
    """Reorder ``chunks`` so that each comes after the one that it continues."""
    earlier = slices_in(lengths, chunks, prefixes).earlier

    def depth(chunk: int) -> int:
        return 0 if chunk < 0 else 1 + depth(earlier[chunk])

    return [chunks[chunk] for chunk in sorted(range(len(chunks)), key=depth)]


def arbitrary_chunks(
    lengths: Sequence[int],
    random: Random,
    first: int = 0,
    alone: bool = False,
) -> tuple[Chunk, ...]:
    """Return random chunks of documents.

    Args:
        lengths: tokens of each document.
        random: source of random numbers.
        first: number of the first document.
        alone: whether every document is a chunk of its own. Otherwise documents of 8 tokens or more
            may be cut, and an uncut document may join a chunk of fewer than four spans.
    """
    chunks: list[list[Span]] = []
    uncut, packed = [], 0.0 if alone else 0.7
    for document, length in enumerate(lengths, first):
        cuts_it = not alone and length >= 8 and random.random() < 0.5
        pieces = random.randint(2, 5) if cuts_it else 1
        cuts = sorted(random.sample(range(1, length), min(pieces, length) - 1))
        boundaries = [0, *cuts, length]
        if len(boundaries) == 2:
            uncut.append(Span(document, 0, length))
            continue
        chunks += ([Span(document, *boundary)] for boundary in pairwise(boundaries))
    for span in uncut:
        places = [chunk for chunk in chunks if len(chunk) < 4]
        chunk = random.choice(places) if places and random.random() < packed else None
        if chunk is None:
            chunks.append([span])
        else:
            chunk.insert(random.randint(0, len(chunk)), span)
    random.shuffle(chunks)
    return tuple(Chunk(tuple(spans)) for spans in chunks)


def by_stage(plan: Plan, walked: Sequence[tuple[int, Op]]) -> tuple[tuple[Op, ...], ...]:
    """Return the order of every stage of ``plan``; ``walked`` lists all ops as (stage, op)."""
    return tuple(
        tuple(op for where, op in walked if where == stage) for stage in range(plan.stages)
    )


def random_walk(
    plan: Plan,
    random: Random,
    split_backward: float,
    besides: Callable[[int, Op, Sequence[set[Op]]], bool] = lambda stage, op, finished: True,
    vocabulary_parallel: bool = False,
) -> list[tuple[int, Op]]:
    """Return the ops of all stages of ``plan``, as (stage, op), in a random order that can run.

    Args:
        plan: plan without orders.
        random: source of random numbers.
        split_backward: probability that a backward is split into I and W.
        besides: additional condition for an op: function of (stage, op, finished ops by stage).
        vocabulary_parallel: whether the plan has ops H and G.
    """
    # Not rules_of(plan): a plan without orders has no backward, so it counts as forward-only.
    needs = needs_of(plan, rules_for(vocabulary_parallel))
    pending: list[set[Op]] = []
    for _ in plan.layers:
        ops = set()
        for chunk in range(len(plan.chunks)):
            ops.add(Op(Kind.FORWARD, chunk))
            if random.random() < split_backward:
                ops |= {Op(Kind.INPUT, chunk), Op(Kind.WEIGHT, chunk)}
            else:
                ops.add(Op(Kind.BACKWARD, chunk))
            if vocabulary_parallel:
                ops |= {Op(kind, chunk) for kind in OF_HEAD}
        pending.append(ops)
    walked: list[tuple[int, Op]] = []
    finished: list[set[Op]] = [set() for _ in plan.layers]

    def ready(stage: int, op: Op) -> bool:
        return besides(stage, op, finished) and all(
            any(other in finished[where] for other in ops) for _, where, ops in needs(stage, op)
        )

    # A preference for forwards or backwards, drawn per plan, gives few or many chunks in flight.
    lean = random.random()
    while any(pending):
        stage = random.choice([s for s, ops in enumerate(pending) if ops])
        able = sorted(
            (op for op in pending[stage] if ready(stage, op)), key=lambda op: (op.chunk, str(op))
        )
        if not able:
            continue
        forwards = [op for op in able if op.kind is Kind.FORWARD]
        others = [op for op in able if op.kind is not Kind.FORWARD]
        op = random.choice((forwards if random.random() < lean else others) or able)
        pending[stage].remove(op)
        finished[stage].add(op)
        walked.append((stage, op))
    return walked
