"""Plans that cut the documents of a loop's micro-batches: chunks of one micro-batch each.

    micro-batch 0   one document of 6000           chunks 0 1 2   its slices, equal in time
    micro-batch 1   documents of 900, 700, 300     chunk 3        side by side

A chunk never holds tokens of two micro-batches, as a micro-batch's loss is computed as a whole. On
the last stage none of its backwards may come before its last forward.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from megatron_epp.ir import KEEP, Chunk, Kind, Op, Plan, Prediction, Span
from megatron_epp.planner.calls import ordering
from megatron_epp.planner.calls.call_plan import AS_GIVEN, GAIN, PLANNED, Freedom
from megatron_epp.planner.calls.memory import Memory
from megatron_epp.planner.calls.recompute import Held, fitted
from megatron_epp.planner.calls.stage_seconds import features
from megatron_epp.planner.chunks.slicing import Rates, equal_points

# Slices of the longest micro-batch that are tried; sizes in between follow from the others.
CUTS = (2, 3, 4, 6, 8, 12, 16)
LEAST_TOKENS = 16  # of a slice


def sliced_plan(
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    rates_SK3: np.ndarray,
    freedom: Freedom,
    forward_only: bool,
) -> Plan:
    """The plan that takes least, micro-batches cut or whole; lengths[micro-batch] of documents.

    PlanError: nothing holds as little as ``freedom.memory`` wants.
    """
    mean_3 = (rates_SK3[:, ordering.F] + rates_SK3[:, ordering.B]).mean(0)
    token, pair, op = mean_3.tolist()
    candidates = list(_cuttings(lengths, Rates(token, pair, op)))
    whole = _whole_work(lengths, rates_SK3)
    given = ordering.given_order(whole)
    room = freedom.room([sum(of) for of in lengths], len(layers))
    ops = max(1, ordering.search_ops(given.seconds) // len(candidates))
    best: ordering.Ordered | None = None
    found: ordering.Ordered | None
    best_cutting, by = candidates[0], PLANNED
    for cutting in candidates:
        work = _work_of(cutting, rates_SK3)
        if forward_only:
            found = _forwards(work)
        elif freedom.memory is not None:
            found = fitted(
                work, _held(cutting, lengths, layers, freedom.memory), freedom.split,
                freedom.reorder, ops,
            )  # fmt: skip
        elif len(layers) == 1:
            found = _in_turn(work)
        else:
            found = ordering.best_order(work, room, freedom.split, freedom.reorder, ops)
        if found is not None and (best is None or found.seconds < best.seconds * (1 - GAIN)):
            best, best_cutting = found, cutting
    if freedom.memory is not None:
        if best is None:
            raise freedom.memory.too_little("slices", max(map(sum, lengths)))
    elif best is None or not (forward_only or freedom.pays(best.seconds, given.seconds)):
        best, best_cutting, by = given, candidates[0], AS_GIVEN
    chunks = tuple(chunk for group in best_cutting for chunk in group)
    return Plan(
        documents=tuple(length for of in lengths for length in of),
        layers=tuple(layers),
        chunks=chunks,
        recompute=best.recompute or tuple((KEEP * count,) * len(chunks) for count in layers),
        orders=best.orders,
        predicted=Prediction(best.seconds, (0.0,) * len(layers), by),
    )


def _forwards(work: ordering.Work) -> ordering.Ordered:
    """Forwards alone, as they stand, alike on all stages."""
    order = tuple(Op(Kind.FORWARD, chunk) for chunk in range(len(work.rows)))
    seconds = ordering.flow_seconds(work.seconds[ordering.F], range(len(work.rows)))
    return ordering.Ordered((order,) * work.stages, seconds, "forwards")


def _cuttings(lengths: Sequence[Sequence[int]], rates: Rates) -> Iterator[list[list[Chunk]]]:
    """Chunks of every micro-batch: first all whole, then cut finer and finer."""
    longest = max(float(rates.document_seconds(np.array(of)).sum()) for of in lengths)
    seen = set()
    for parts in (1, *CUTS):
        cutting = [
            _chunks(first, of, longest / parts * (1 + 1e-9), rates)
            for first, of in zip(_firsts(lengths), lengths, strict=True)
        ]
        key = tuple(map(tuple, cutting))
        if key not in seen:
            seen.add(key)
            yield cutting


def _held(
    cutting: Sequence[Sequence[Chunk]],
    lengths: Sequence[Sequence[int]],
    layers: Sequence[int],
    memory: Memory,
) -> Held:
    documents = [length for of in lengths for length in of]
    chunks = [chunk for group in cutting for chunk in group]
    return Held(
        memory,
        tokens=np.array([chunk.tokens for chunk in chunks]),
        cut=np.array(
            [chunk.spans[0].tokens < documents[chunk.spans[0].document] for chunk in chunks]
        ),
        loss=np.array([chunk is group[-1] for group in cutting for chunk in group]),
        layers=np.array(layers),
    )


def _firsts(lengths: Sequence[Sequence[int]]) -> list[int]:
    return np.cumsum([0, *map(len, lengths)])[:-1].tolist()


def _chunks(first: int, lengths: Sequence[int], target: float, rates: Rates) -> list[Chunk]:
    """Of one micro-batch, about ``target`` seconds each; its documents are first, first + 1, ...

    What is not cut is packed, the longest first, into the chunk with the most room. Packs come
    first: the backward of a slice has one forward less to wait for.
    """
    slices: list[Chunk] = []
    packs: list[tuple[float, list[Span]]] = []
    seconds = rates.document_seconds(np.array(lengths))
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length, takes = lengths[document], float(seconds[document])
        pieces = min(round(takes / target), max(1, length // LEAST_TOKENS))
        if pieces > 1:
            points = equal_points(length, pieces, rates).tolist()
            slices += (Chunk((Span(first + document, *pair),)) for pair in pairwise(points))
            continue
        place = min(packs, key=lambda pack: pack[0], default=None)
        if place is None or place[0] + takes > target:
            packs.append((takes, [Span(first + document, 0, length)]))
        else:
            packs.remove(place)
            packs.append((place[0] + takes, [*place[1], Span(first + document, 0, length)]))
    return [*(Chunk(tuple(sorted(spans))) for _, spans in packs), *slices]


def _whole_work(lengths: Sequence[Sequence[int]], rates_SK3: np.ndarray) -> ordering.Work:
    firsts = _firsts(lengths)
    cutting = [
        [Chunk(tuple(Span(first + d, 0, length) for d, length in enumerate(of)))]
        for first, of in zip(firsts, lengths, strict=True)
    ]
    return _work_of(cutting, rates_SK3)


def _work_of(cutting: Sequence[Sequence[Chunk]], rates_SK3: np.ndarray) -> ordering.Work:
    chunks = [chunk for group in cutting for chunk in group]
    tokens, pairs = [chunk.tokens for chunk in chunks], [chunk.pairs for chunk in chunks]
    seconds = np.einsum("skf,fc->ksc", rates_SK3, features(tokens, pairs))
    return ordering.Work(seconds, np.array(tokens), np.array([len(group) for group in cutting]))


def _in_turn(work: ordering.Work) -> ordering.Ordered:
    """One stage: group by group."""
    order: list[Op] = []
    for start, size in zip(work.starts, work.sizes, strict=False):
        chunks = range(int(start), int(start + size))
        order += (Op(Kind.FORWARD, chunk) for chunk in chunks)
        order += (Op(Kind.BACKWARD, chunk) for chunk in reversed(chunks))
    seconds = float(work.seconds[ordering.F].sum() + work.seconds[ordering.B].sum())
    return ordering.Ordered((tuple(order),), seconds, "in turn")
