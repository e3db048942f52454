"""Candidate slicings of a call's documents into slices of about equal time, from coarse to fine."""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np

from megatron_epp.ir import Prefixes, Span
from megatron_epp.planner.calls.call_cost import CallChunks
from megatron_epp.planner.chunks.slicing import Rates, equal_points
from megatron_epp.planner.chunks.tree_cutting import Parents, tree_seconds

# Numbers of slices of the longest micro-batch that are tried.
CUTS = (2, 3, 4, 6, 8, 12, 16)
LEAST_TOKENS = 16  # least length of a slice


def cuttings(
    lengths: Sequence[Sequence[int]],
    rates: Rates,
    cut: Collection[int] | None = None,
    parents: Sequence[Parents] = (),
) -> Iterator[CallChunks]:
    """Yield the call's chunks: first all micro-batches unsliced, then finer and finer slices.

    Args:
        lengths: lengths[m] contains the tokens of every document of micro-batch m.
        rates: seconds per token, query-key pair and chunk.
        cut: micro-batches that may be sliced; None for all.
        parents: parents[m][d] is the document that document d of micro-batch m continues, or -1;
            () if no document continues another.
    """
    may = range(len(lengths)) if cut is None else cut
    documents = tuple(length for of in lengths for length in of)
    firsts = np.cumsum([0, *map(len, lengths)])[:-1].tolist()
    trees = [tree_seconds(*pair, rates) for pair in zip(lengths, parents, strict=bool(parents))]
    prefixes: Prefixes = ()
    if trees:
        longest = max(tree.total for tree in trees)
        prefixes = tuple(
            None if parent < 0 else Span(first + parent, 0, of[parent])
            for first, of, tree in zip(firsts, lengths, trees, strict=True)
            for parent in tree.parents
        )
    else:
        takes = (float(rates.document_seconds(np.array(lengths[number])).sum()) for number in may)
        longest = max(takes, default=1.0)
    seen = set()
    for parts in (1, *CUTS):
        target = longest / parts * (1 + 1e-9)
        groups = tuple(
            tuple(
                trees[number].chunks(first, target, LEAST_TOKENS)
                if trees
                else _chunks(first, of, target if number in may else np.inf, rates)
            )
            for number, (first, of) in enumerate(zip(firsts, lengths, strict=True))
        )
        if groups not in seen:
            seen.add(groups)
            yield CallChunks.of(groups, documents, prefixes)


def _chunks(
    first: int, lengths: Sequence[int], target: float, rates: Rates
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Yield the chunks of one micro-batch, each of about ``target`` seconds.

    A chunk is a tuple of spans (document, start, stop). The micro-batch contains the documents
    ``first``, ``first + 1``, ... Unsliced documents are packed, the longest first, into the least
    loaded chunk. Packs run before slices, because the backward of a slice waits for one more
    forward than the backward of a pack.
    """
    slices: list[tuple[tuple[int, int, int], ...]] = []
    packs: list[tuple[float, list[tuple[int, int, int]]]] = []
    seconds = rates.document_seconds(np.array(lengths))
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length, takes = lengths[document], float(seconds[document])
        uncut = (first + document, 0, length)
        pieces = min(round(takes / target), max(1, length // LEAST_TOKENS))
        if pieces > 1:
            points = equal_points(length, pieces, rates).tolist()
            slices += (((first + document, *pair),) for pair in pairwise(points))
            continue
        place = min(packs, key=lambda pack: pack[0], default=None)
        if place is None or place[0] + takes > target:
            packs.append((takes, [uncut]))
        else:
            packs.remove(place)
            packs.append((place[0] + takes, [*place[1], uncut]))
    yield from (tuple(sorted(spans)) for _, spans in packs)
    yield from slices
