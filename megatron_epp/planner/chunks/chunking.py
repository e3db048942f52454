"""Chunks as arrays: what every chunk holds, and the order of their forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_epp.ir import ALL_RANKS, Chunk, Span
from megatron_epp.planner.chunks.slicing import Cuts, Rates, Spans


@dataclass(frozen=True, slots=True)
class Chunking:
    """Chunks numbered in forward order; the slices of a cut document are neighbours, in order.

    A group is one cut document's chunks, or one pack. Backward runs the groups in the same order,
    and the chunks of a group in reverse.

    spans, chunk   every span, and the chunk it is in
    starts         group g is chunks starts[g] to starts[g + 1]
    document       per chunk: the cut document that it holds a slice of, or -1
    slice_tokens   per chunk: tokens of that slice, or 0
    rank           of every span the context-parallel rank, of ``ranks``, that computes it alone, or
                   ALL_RANKS; None: all are spread
    """

    spans: Spans
    chunk: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray
    pairs: np.ndarray
    document: np.ndarray
    slice_tokens: np.ndarray
    rank: np.ndarray | None = field(default=None, kw_only=True)
    ranks: int = field(default=1, kw_only=True)

    @classmethod
    def of_spans(
        cls, spans: Spans, chunk: np.ndarray, starts: np.ndarray, cut: np.ndarray
    ) -> "Chunking":
        """``cut``: whether each span is a slice of a cut document."""
        count = int(starts[-1])
        document = np.full(count, -1, dtype=np.int64)
        slice_tokens = np.zeros(count, dtype=np.int64)
        document[chunk[cut]] = spans.document[cut]
        slice_tokens[chunk[cut]] = spans.tokens[cut]
        tokens = np.bincount(chunk, weights=spans.tokens, minlength=count).astype(np.int64)
        pairs = np.bincount(chunk, weights=spans.pairs, minlength=count).astype(np.int64)
        return cls(spans, chunk, starts, tokens, pairs, document, slice_tokens)

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def groups(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Chunks of every group: N_split of a cut document, 1 of a pack."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def group(self) -> np.ndarray:
        """Per chunk, its group."""
        return np.repeat(np.arange(self.groups), self.sizes)

    @property
    def last_of_group(self) -> np.ndarray:
        """Per chunk, the last one of its group."""
        return last_of_groups(self.starts)

    @property
    def backward(self) -> np.ndarray:
        """Chunks in the order of their backwards."""
        return backward_order(self.starts)

    @property
    def contents(self) -> tuple[bytes, ...]:
        """All that chunks and groups hold, to compare chunkings by."""
        spans, rank = self.spans, () if self.rank is None else (self.rank,)
        of = self.starts, self.chunk, spans.document, spans.start, spans.stop, *rank
        return tuple(each.tobytes() for each in of)

    def arranged(self, order: Sequence[int] | np.ndarray) -> "Chunking":
        """The same chunks with the groups in another order."""
        order = np.asarray(order)
        sizes = self.sizes[order]
        starts = starts_of(sizes)
        old = np.repeat(self.starts[order] - starts[:-1], sizes) + np.arange(self.count)
        new = np.empty_like(old)
        new[old] = np.arange(self.count)
        return Chunking(
            self.spans,
            new[self.chunk],
            starts,
            self.tokens[old],
            self.pairs[old],
            self.document[old],
            self.slice_tokens[old],
            rank=self.rank,
            ranks=self.ranks,
        )

    def ir_chunks(self, names: Sequence[int]) -> tuple[Chunk, ...]:
        """As ir chunks; ``names[d]`` is what document d is called outside."""
        spans: list[list[Span]] = [[] for _ in range(self.count)]
        rank = np.full(len(self.spans), ALL_RANKS) if self.rank is None else self.rank
        rows = zip(
            self.chunk.tolist(),
            self.spans.document.tolist(),
            self.spans.start.tolist(),
            self.spans.stop.tolist(),
            rank.tolist(),
            strict=True,
        )
        for chunk, document, start, stop, where in rows:
            spans[chunk].append(Span(names[document], start, stop, where))
        return tuple(Chunk(tuple(held)) for held in spans)


def starts_of(sizes: np.ndarray) -> np.ndarray:
    """[groups + 1] where groups of these ``sizes`` begin, and where the last one ends."""
    return np.concatenate(([0], sizes.cumsum()))


def last_of_groups(starts: np.ndarray) -> np.ndarray:
    """[chunks] of groups that begin at ``starts``: the last chunk of each one's group."""
    return (starts[1:] - 1).repeat(starts[1:] - starts[:-1])


def backward_order(starts: np.ndarray) -> np.ndarray:
    """Chunks in the order of their backwards: the groups as they stand, each from its end."""
    first_and_last = starts[1:] + starts[:-1] - 1  # added up
    return first_and_last.repeat(starts[1:] - starts[:-1]) - np.arange(int(starts[-1]))


def assemble(cuts: Cuts, bucket: np.ndarray, buckets: int, rates: Rates) -> Chunking:
    """Chunks from slices and buckets: cut documents, then packs, each longest first.

    bucket   of every tail, then of every short; tail t lies in bucket t
    """
    tails = len(cuts.tails)
    inner = np.bincount(cuts.slices.document, minlength=tails)  # slices before each tail
    sizes = np.concatenate((inner + 1, np.ones(buckets - tails, dtype=np.int64)))
    starts = starts_of(sizes)
    # Cut documents are the longest ones, so document t's tail opens bucket t.
    before = np.arange(len(cuts.slices)) - (np.cumsum(inner) - inner)[cuts.slices.document]
    chunk = np.concatenate((starts[cuts.slices.document] + before, starts[bucket + 1] - 1))
    spans = cuts.slices + cuts.tails + cuts.shorts
    chunking = Chunking.of_spans(spans, chunk, starts, spans.document < tails)
    seconds = rates.chunk_spans_seconds(spans, chunk, chunking.tokens, chunking.pairs)
    seconds = seconds[starts[tails:-1]]
    packs = tails + np.argsort(-seconds, kind="stable")
    return chunking.arranged(np.concatenate((np.arange(tails), packs)))
