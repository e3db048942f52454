"""Candidate slicings of a call's documents into slices of about equal time, from coarse to fine."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_epp.ir import Prefixes
from megatron_epp.planner.calls.call_cost import CallChunks, CallDocuments, Groups, renumbered
from megatron_epp.planner.chunks.slicing import Rates, equal_points
from megatron_epp.planner.chunks.tree_cutting import Tree, tree_seconds

# Numbers of slices of the longest micro-batch that are tried.
CUTS = (2, 3, 4, 6, 8, 12, 16)
LEAST_TOKENS = 16  # least length of a slice


def cuttings(
    replicas: Sequence[CallDocuments], rates: Rates, cut: Collection[int] | None = None
) -> Iterator[CallChunks]:
    """Yield the call's chunks: first all micro-batches unsliced, then finer and finer slices.

    Args:
        replicas: documents of every replica's micro-batches; several replicas run in lockstep.
        rates: seconds per token, query-key pair and chunk.
        cut: micro-batches that may be sliced; None for all.
    """
    calls = [_ReplicaCall.of(call, rates, cut) for call in replicas]
    longest = max(call.longest for call in calls) or 1.0
    seen = set()
    for parts in (1, *CUTS):
        target = longest / parts * (1 + 1e-9)
        groups = tuple(call.groups(target) for call in calls)
        if groups not in seen:
            seen.add(groups)
            yield CallChunks.in_lockstep(
                [
                    CallChunks.of(of, call.documents, call.prefixes)
                    for of, call in zip(groups, calls, strict=True)
                ],
                rates,
            )


@dataclass(frozen=True, slots=True)
class _ReplicaCall:
    """Micro-batches of one replica, with what their chunks follow from.

    Attributes:
        call: the documents.
        rates: seconds per token, query-key pair and chunk.
        may: micro-batches that may be sliced.
        firsts: first document of each micro-batch, among all documents of the call.
        trees: the trees of the micro-batches; () if no document continues another.
        longest: seconds of the longest micro-batch that may be sliced; 0 without one.
    """

    call: CallDocuments
    rates: Rates
    may: Collection[int]
    firsts: Sequence[int]
    trees: Sequence[Tree]
    longest: float

    @classmethod
    def of(cls, call: CallDocuments, rates: Rates, cut: Collection[int] | None) -> "_ReplicaCall":
        lengths, parents = call.lengths, call.parents
        may = range(len(lengths)) if cut is None else [n for n in cut if n < len(lengths)]
        firsts = np.cumsum([0, *map(len, lengths)])[:-1].tolist()
        trees = [tree_seconds(*pair, rates) for pair in zip(lengths, parents, strict=bool(parents))]
        takes = (float(rates.document_seconds(np.array(lengths[number])).sum()) for number in may)
        longest = max((tree.total for tree in trees) if trees else takes, default=0.0)
        return cls(call, rates, may, firsts, trees, longest)

    @property
    def documents(self) -> tuple[int, ...]:
        return tuple(length for of in self.call.lengths for length in of)

    @property
    def prefixes(self) -> Prefixes:
        return tuple(
            renumbered(prefix, first)
            for first, tree in zip(self.firsts, self.trees, strict=bool(self.trees))
            for prefix in tree.prefixes
        )

    def groups(self, target: float) -> Groups:
        """Return the chunks of every micro-batch, each of about ``target`` seconds."""
        if self.trees:
            return tuple(
                tuple(tree.chunks(first, target, LEAST_TOKENS))
                for first, tree in zip(self.firsts, self.trees, strict=True)
            )
        return tuple(
            tuple(_chunks(first, of, target if number in self.may else np.inf, self.rates))
            for number, (first, of) in enumerate(zip(self.firsts, self.call.lengths, strict=True))
        )


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
