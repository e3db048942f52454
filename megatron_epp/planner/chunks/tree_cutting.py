"""Slicing of micro-batches with shared prefixes, into chunks of about equal time.

    parents      - 0 0 0 2          chunks      [0 first half] [0 second half, 1] [2, 4] [3]
    0 ----- 1                       continues    -              chunk 0             chunk 1 chunk 1
      |---- 2 --- 4
      `---- 3

Document d continues document parents[d], its prefix; -: it has none. A prefix is computed once, so
its time counts once. A chunk continues at most one other chunk. A subtree that fits into a chunk is
not divided: such subtrees are packed evenly into the chunk of their prefix, as far as it has
capacity, and into chunks that continue it. A short prefix of a larger subtree goes to the chunk
that it continues, so that long answers to several turns of a conversation are packed together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_epp import ir
from megatron_epp.ir import Prefixes
from megatron_epp.planner.chunks.slicing import Rates

Parents = Sequence[int]  # of every document of a micro-batch: an earlier document, or -1
Span = tuple[int, int, int]  # (document, start, stop)
Spans = tuple[Span, ...]
OVER = 1.15  # most seconds of a bin that is filled evenly, as a fraction of the target


@dataclass(frozen=True, slots=True)
class Tree:
    """Documents of a micro-batch; a document may continue another one, its parent.

    Attributes:
        lengths: number of tokens of each document, without its prefix.
        parents: index of the document that each document continues, or -1.
        rates: seconds per token, query-key pair and chunk.
        offsets: number of tokens of all ancestors of each document, which is the position of its
            first token.
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

    @property
    def prefixes(self) -> Prefixes:
        """The span that each document continues, or None."""
        return tuple(
            None if parent < 0 else ir.Span(parent, 0, self.lengths[parent])
            for parent in self.parents
        )

    def span_seconds(self, span: Span) -> float:
        """Return the seconds of a span, without ``rates.chunk_seconds``."""
        document, start, stop = span
        if stop - start == self.lengths[document]:
            return self.own[document]
        ends = np.array([start, stop]) + self.offsets[document]
        return float(np.diff(self.rates.document_seconds(ends))[0])

    def chunks(self, first: int, target: float, least: int) -> list[Spans]:
        """Return chunks of about ``target`` seconds, in an order in which prefixes come first.

        Args:
            first: index of the micro-batch's first document among all documents of the call.
            target: seconds of a chunk.
            least: minimum number of tokens of a slice.
        """
        chunks, _ = self.cut(target, target, least)
        return [tuple((first + d, start, stop) for d, start, stop in spans) for spans in chunks]

    def cut(
        self,
        target: float,
        slice_target: float,
        least: int = 1,
        most_tokens: float = np.inf,
        multiple: int = 1,
        roots: Sequence[int] | None = None,
    ) -> tuple[list[list[Span]], list[int]]:
        """Return the spans of every chunk, and the chunk that each chunk continues, or -1.

        A chunk comes after the one that it continues.

        Args:
            target: seconds of a chunk of unsliced documents.
            slice_target: seconds of a slice.
            least: minimum number of tokens of a slice.
            most_tokens: maximum number of tokens of a chunk.
            multiple: number of tokens; inner boundaries of slices, counted from the first token of
                the document, are multiples of it.
            roots: documents to cut together with all documents that continue them; default: all.
        """
        children: dict[int, list[int]] = {}
        for document, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(document)
        sizes = list(self.lengths)  # of each document and all its descendants
        for document in reversed(range(len(sizes))):
            if (parent := self.parents[document]) >= 0:
                sizes[parent] += sizes[document]
        chunks: list[list[Span]] = []
        continued: list[int] = []

        def opened(after: int) -> int:
            chunks.append([])
            continued.append(after)
            return len(chunks) - 1

        # Documents to place, with the chunk that they continue, its seconds and its tokens so far.
        waiting: list[tuple[list[int], int, float, int]] = [
            (children.get(-1, []) if roots is None else list(roots), -1, 0.0, 0)
        ]
        while waiting:
            open_ones, after, filled, tokens = waiting.pop()
            siblings = list(open_ones)
            small: list[int] = []
            large: list[int] = []
            for document in siblings:  # grows while prefixes go to the chunk that they continue
                own, length = self.own[document], self.lengths[document]
                if self.below[document] <= target and sizes[document] <= most_tokens:
                    small.append(document)
                elif after >= 0 and filled + own <= target and tokens + length <= most_tokens:
                    chunks[after].append((document, 0, length))
                    filled, tokens = filled + own, tokens + length
                    siblings += children.get(document, [])
                else:
                    large.append(document)
            small.sort(key=lambda d: -self.below[d])
            bins = [(filled, after, tokens)] if after >= 0 else []
            loose = sum(self.below[d] for d in small) + filled
            count = int(-(-loose // target)) if small else 0
            bins += [(0.0, opened(after), 0) for _ in range(count - len(bins))]
            for document in small:
                takes, size = self.below[document], sizes[document]
                fitting = (each for each in bins if each[2] + size <= most_tokens)
                place = min(fitting, default=(np.inf, -1, 0))
                if place[0] + takes > target * OVER:
                    place = 0.0, opened(after), 0
                else:
                    bins.remove(place)
                bins.append((place[0] + takes, place[1], place[2] + size))
                chunks[place[1]] += self._subtree(document, children)
            for document in large:
                length = self.lengths[document]
                pieces = max(1, min(round(self.own[document] / slice_target), length // least))
                points = self._points(document, pieces, multiple)
                while max(np.diff(points)) > most_tokens and pieces < length:
                    pieces += 1
                    points = self._points(document, pieces, multiple)
                at = after
                for pair in pairwise(points):
                    at = opened(at)
                    chunks[at].append((document, *pair))
                taken = self.own[document] / (len(points) - 1)
                size = points[-1] - points[-2]
                waiting.append((children.get(document, []), at, taken, size))
        full = [number for number, spans in enumerate(chunks) if spans]
        new = {number: at for at, number in enumerate(full)} | {-1: -1}
        return [chunks[number] for number in full], [new[continued[number]] for number in full]

    def _subtree(self, document: int, children: dict[int, list[int]]) -> list[Span]:
        spans, open_ones = [], [document]
        while open_ones:
            document = open_ones.pop()
            spans.append((document, 0, self.lengths[document]))
            open_ones += reversed(children.get(document, []))
        return spans

    def _points(self, document: int, pieces: int, multiple: int = 1) -> list[int]:
        """Return the boundaries of ``pieces`` slices of equal time, including both ends."""
        before = self.rates.document_seconds(np.array([self.offsets[document]]))[0]
        targets = before + self.own[document] * np.arange(1, pieces) / pieces
        inner = self.rates.reach(targets) - self.offsets[document]
        inner = np.rint(inner / multiple).astype(np.int64) * multiple
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
