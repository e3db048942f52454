"""Slicing of micro-batches with shared prefixes, into chunks of about equal time.

    parents      - 0 0 0 2          chunks      [0 first half] [0 second half, 1] [2, 4] [3]
    0 ----- 1                       continues    -              chunk 0             chunk 1 chunk 1
      |---- 2 --- 4
      `---- 3

Document d continues document parents[d], its prefix. A prefix is computed once, so its time
counts once. A chunk continues at most one other chunk. A subtree that fits into a chunk is not
divided: it goes into the chunk of its prefix if this chunk has capacity, else into a chunk with
sibling subtrees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_epp.planner.chunks.slicing import Rates

Parents = Sequence[int]  # of every document of a micro-batch: an earlier document, or -1
Spans = tuple[tuple[int, int, int], ...]  # (document, start, stop)


@dataclass(frozen=True, slots=True)
class Tree:
    """Documents of a micro-batch; a document may continue another one, its parent.

    Attributes:
        lengths: number of tokens of each document, without its prefix.
        parents: index of the document that each document continues, or -1.
        rates: seconds per token, query-key pair and chunk.
        offsets: position of each document's first token, counted from the start of its prefix.
        own: seconds of each document without its prefix.
        below: seconds of each document and all its descendants.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    rates: Rates
    offsets: tuple[int, ...]
    own: tuple[float, ...]
    below: tuple[float, ...]

    @property
    def total(self) -> float:
        """Seconds of all documents; a shared prefix counts once."""
        return sum(self.own)

    def chunks(self, first: int, target: float, least: int) -> list[Spans]:
        """Return chunks of about ``target`` seconds, in an order in which prefixes come first.

        Args:
            first: index of the micro-batch's first document among all documents of the call.
            target: seconds of a chunk.
            least: minimum number of tokens of a slice.
        """
        children: dict[int, list[int]] = {}
        for document, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(document)
        chunks: list[list[tuple[int, int, int]]] = []
        # Siblings, with the chunk that they continue and its seconds so far.
        waiting: list[tuple[list[int], int, float]] = [(children.get(-1, []), -1, 0.0)]
        while waiting:
            siblings, after, filled = waiting.pop()
            bins = [] if after < 0 else [(filled, after)]
            large = []
            for document in sorted(siblings, key=lambda d: -self.below[d]):
                takes = self.below[document]
                if takes > target:
                    large.append(document)
                    continue
                place = min(bins, default=(np.inf, -1))
                if place[0] + takes > target:
                    chunks.append([])
                    place = 0.0, len(chunks) - 1
                else:
                    bins.remove(place)
                bins.append((place[0] + takes, place[1]))
                chunks[place[1]] += self._subtree(document, children)
            for document in large:
                length = self.lengths[document]
                pieces = min(round(self.own[document] / target), max(1, length // least))
                points = self._points(document, max(1, pieces))
                chunks += ([(document, *pair)] for pair in pairwise(points))
                taken = self.own[document] / (len(points) - 1)
                waiting.append((children.get(document, []), len(chunks) - 1, taken))
        return [tuple((first + d, start, stop) for d, start, stop in spans) for spans in chunks]

    def _subtree(self, document: int, children: dict[int, list[int]]) -> list[tuple[int, int, int]]:
        spans, open_ones = [], [document]
        while open_ones:
            document = open_ones.pop()
            spans.append((document, 0, self.lengths[document]))
            open_ones += reversed(children.get(document, []))
        return spans

    def _points(self, document: int, pieces: int) -> list[int]:
        """Return the boundaries of ``pieces`` slices of equal time, including both ends."""
        before = self.rates.document_seconds(np.array([self.offsets[document]]))[0]
        targets = before + self.own[document] * np.arange(1, pieces) / pieces
        inner = np.rint(self.rates.reach(targets)).astype(np.int64) - self.offsets[document]
        length = self.lengths[document]
        inner = np.unique(inner[(inner > 0) & (inner < length)])
        return [0, *inner.tolist(), length]


def tree_seconds(lengths: Sequence[int], parents: Parents, rates: Rates) -> Tree:
    """Return the tree of a micro-batch's documents, whose ``parents`` come before them."""
    offsets = [0] * len(lengths)
    for document, parent in enumerate(parents):
        if parent >= 0:
            offsets[document] = offsets[parent] + lengths[parent]
    starts = np.array(offsets)
    own = rates.document_seconds(starts + np.array(lengths)) - rates.document_seconds(starts)
    below = own.tolist()
    for document in reversed(range(len(lengths))):
        if parents[document] >= 0:
            below[parents[document]] += below[document]
    return Tree(
        tuple(lengths), tuple(parents), rates, tuple(offsets), tuple(own.tolist()), tuple(below)
    )
