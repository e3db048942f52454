"""Chunks as arrays: their contents, and the order of their forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from megatron_epp.ir import ALL_RANKS, Chunk, Span
from megatron_epp.planner.chunks.slicing import Cuts, Rates, Spans


@dataclass(frozen=True, slots=True)
class Chunking:
    """Chunks numbered in forward order; slices of a sliced document are consecutive.

    A group is either all chunks of one sliced document, or one pack. Backwards run the groups
    in the order of the forwards, but the chunks of a group in reverse.

    Attributes:
        spans: spans of documents in all chunks.
        chunk: [spans] index of the chunk of every span.
        starts: [groups + 1]; group g consists of the chunks starts[g] to starts[g + 1] - 1.
        tokens: [chunks] number of tokens of every chunk.
        pairs: [chunks] number of query-key pairs of every chunk.
        document: [chunks] sliced document of which the chunk holds a slice, or -1.
        slice_tokens: [chunks] number of tokens of this slice, or 0.
        rank: [spans] context-parallel rank that computes the span alone, or ALL_RANKS. None: all
            spans are sharded over all ranks.
        ranks: number of context-parallel ranks.
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
        """Build chunks from spans of documents.

        Args:
            spans: spans of documents in all chunks.
            chunk: [spans] index of the chunk of every span.
            starts: [groups + 1]; group g consists of the chunks starts[g] to starts[g + 1] - 1.
            cut: [spans] whether each span is a slice of a sliced document.
        """
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
        """Number of chunks."""
        return len(self.tokens)

    @property
    def groups(self) -> int:
        """Number of groups (sliced documents and packs)."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of chunks of every group, [groups]; 1 for a pack."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def widths(self) -> np.ndarray:
        """Most chunks of every group that are in flight at a backward of 1F1B."""
        return self.sizes

    @property
    def group(self) -> np.ndarray:
        """Index of the group of every chunk."""
        return np.repeat(np.arange(self.groups), self.sizes)

    @property
    def last_of_group(self) -> np.ndarray:
        """For every chunk, the last chunk of its group (sliced document or pack)."""
        return last_of_groups(self.starts)

    @property
    def backward(self) -> np.ndarray:
        """Chunks in the order of their backwards."""
        return backward_order(self.starts)

    @property
    def contents(self) -> tuple[bytes, ...]:
        """Contents of chunks and groups as bytes, to compare chunkings."""
        spans, rank = self.spans, () if self.rank is None else (self.rank,)
        of = self.starts, self.chunk, spans.document, spans.start, spans.stop, *rank
        return tuple(each.tobytes() for each in of)

    def arranged(self, order: Sequence[int] | np.ndarray) -> Self:
        """Return the same chunks with the groups in ``order``."""
        order = np.asarray(order)
        sizes = self.sizes[order]
        starts = starts_of(sizes)
        old = np.repeat(self.starts[order] - starts[:-1], sizes) + np.arange(self.count)
        new = np.empty_like(old)
        new[old] = np.arange(self.count)
        return replace(
            self,
            chunk=new[self.chunk],
            starts=starts,
            tokens=self.tokens[old],
            pairs=self.pairs[old],
            document=self.document[old],
            slice_tokens=self.slice_tokens[old],
        )

    def ir_chunks(self, names: Sequence[int]) -> tuple[Chunk, ...]:
        """Return the chunks as ``ir.Chunk``, in which document d has the index ``names[d]``."""
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
    """Return an array [groups + 1]: the first chunk of each group, then the number of chunks."""
    return np.concatenate(([0], sizes.cumsum()))


def last_of_groups(starts: np.ndarray) -> np.ndarray:
    """Return, for each chunk, the last chunk of its group; groups begin at ``starts``."""
    return (starts[1:] - 1).repeat(starts[1:] - starts[:-1])


def backward_order(starts: np.ndarray) -> np.ndarray:
    """Return the chunks in the order of their backwards, each group in reverse: [chunks]."""
    first_and_last = starts[1:] + starts[:-1] - 1  # sum of a group's first and last chunk
    return first_and_last.repeat(starts[1:] - starts[:-1]) - np.arange(int(starts[-1]))


def assemble(cuts: Cuts, bucket: np.ndarray, buckets: int, rates: Rates) -> Chunking:
    """Build chunks from slices and buckets: sliced documents, then packs, both longest first.

    Args:
        cuts: slices, tails (last slices) and short documents.
        bucket: [tails + short documents] bucket of every tail, then of every short document; tail t
            is in bucket t.
        buckets: number of buckets.
        rates: seconds per token, query-key pair and chunk.
    """
    tails = len(cuts.tails)
    inner = np.bincount(cuts.slices.document, minlength=tails)  # number of slices before each tail
    sizes = np.concatenate((inner + 1, np.ones(buckets - tails, dtype=np.int64)))
    starts = starts_of(sizes)
    # Sliced documents are the longest ones, so document t's tail opens bucket t.
    before = np.arange(len(cuts.slices)) - (np.cumsum(inner) - inner)[cuts.slices.document]
    chunk = np.concatenate((starts[cuts.slices.document] + before, starts[bucket + 1] - 1))
    spans = cuts.slices + cuts.tails + cuts.shorts
    chunking = Chunking.of_spans(spans, chunk, starts, spans.document < tails)
    seconds = rates.chunk_spans_seconds(spans, chunk, chunking.tokens, chunking.pairs)
    seconds = seconds[starts[tails:-1]]
    packs = tails + np.argsort(-seconds, kind="stable")
    return chunking.arranged(np.concatenate((np.arange(tails), packs)))
