"""Loads of chunks: the quantities that determine the seconds and bytes of a stage."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from megatron_epp.ir import (
    ALL_RANKS,
    CachedDocument,
    Chunk,
    Plan,
    Prefixes,
    Slices,
    Span,
    offsets_of,
    slices_in,
    slices_of,
)


@dataclass(frozen=True, slots=True)
class LocalSpans:
    """Spans that single context-parallel ranks compute alone, and their tokens in each chunk.

    Attributes:
        rank: [spans] rank of every span; ALL_RANKS if the span is sharded over all ranks.
        ranks: context-parallel size.
        tokens: [C], tokens of each chunk that need no CP all-to-all, counted as ``ranks`` times the
            tokens that the busiest rank computes alone.
    """

    rank: np.ndarray
    ranks: int
    tokens: np.ndarray


def local_of(
    chunk: np.ndarray, rank: np.ndarray, tokens: np.ndarray, ranks: int, chunks: int
) -> LocalSpans | None:
    """Return the spans that ranks compute alone; None if all spans are sharded over the ranks.

    Args:
        chunk: [spans] chunk of each span.
        rank: [spans] rank of each span; ALL_RANKS if the span is sharded.
        tokens: [spans] tokens of each span.
        ranks: context-parallel size.
        chunks: number of chunks.
    """
    if ranks == 1 or not (rank >= 0).any():
        return None
    there = np.where(rank >= 0, tokens, 0)
    return LocalSpans(rank, ranks, over_ranks(chunk, rank, there, ranks, chunks))


def over_ranks(
    chunk: np.ndarray, rank: np.ndarray, amount: np.ndarray, ranks: int, chunks: int
) -> np.ndarray:
    """Return [C] sums of ``amount`` over the spans of each chunk, scaled to the busiest rank.

    The sum of a chunk is the amount of its sharded spans, plus ``ranks`` times the largest amount
    of single-rank spans on one rank.

    Args:
        chunk: [spans] chunk of each span.
        rank: [spans] rank of each span; ALL_RANKS if the span is sharded.
        amount: [spans] quantity of each span.
        ranks: context-parallel size.
        chunks: number of chunks.
    """
    over_all = np.bincount(chunk, weights=np.where(rank >= 0, 0, amount), minlength=chunks)
    at = rank >= 0
    place = chunk[at] * ranks + rank[at]
    each = np.bincount(place, weights=amount[at], minlength=chunks * ranks)
    return over_all + ranks * each.reshape(chunks, ranks).max(axis=1)


@dataclass(frozen=True)  # no slots, because results are cached
class Loads:
    """Arrays over the chunks [C] of one plan and over its documents [D].

    Attributes:
        tokens: [C], tokens of each chunk, padding included, counted as in :func:`over_ranks`.
        pairs: [C], query-key pairs of full causal attention, counted as in :func:`over_ranks`.
        cut_tokens: [C], tokens of the chunk's slice of a cut document; 0 if it has no slice.
        document: [C], document of the chunk's slice; -1 if it has no slice.
        earlier: [C], chunk with the preceding slice, or -1.
        later: [C], chunk with the following slice, or -1.
        lengths: [D], tokens of the documents.
        spans: three arrays over all spans: chunk, first token, and token after the last.
        local: spans on single context-parallel ranks; None: all spans are sharded over all ranks.
        kept: documents whose K and V are cached; None: all cut documents.
    """

    tokens: np.ndarray
    pairs: np.ndarray
    cut_tokens: np.ndarray
    document: np.ndarray
    earlier: np.ndarray
    later: np.ndarray
    lengths: np.ndarray
    spans: tuple[np.ndarray, np.ndarray, np.ndarray]
    local: LocalSpans | None = field(default=None, kw_only=True)
    kept: Sequence[CachedDocument] | None = field(default=None, kw_only=True)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.tokens)

    @property
    def parts(self) -> "tuple[Loads, ...]":
        """Loads that :func:`join_loads` joined; these loads alone if none were joined."""
        return (self,)

    def over_chunks(self, amount: np.ndarray) -> np.ndarray:
        """Return [C] sums of ``amount`` over the spans of each chunk; see :func:`over_ranks`."""
        chunk = self.spans[0]
        if self.local is not None:
            return over_ranks(chunk, self.local.rank, amount, self.local.ranks, self.chunks)
        return np.bincount(chunk, weights=amount, minlength=self.chunks)

    def tail_tokens(self, window: int) -> np.ndarray:
        """Return, for each document, the number of tokens that later slices attend to: [D].

        ``window`` is the maximum number of keys of a query, its own included; 0: no maximum. Later
        slices attend to the last ``window - 1`` tokens of each slice, or to all tokens of a shorter
        slice. The result is 0 for an uncut document.
        """
        if not window:
            return self.context_tokens
        boundary = self.later >= 0
        tails = np.minimum(self.cut_tokens[boundary], window - 1)
        return np.bincount(self.document[boundary], weights=tails, minlength=len(self.lengths))

    def cached_tokens(self, stores_last_slice: bool) -> np.ndarray:
        """Return how many tokens of each chunk have K and V only in a document's buffer: [C].

        They are the tokens of slices that are alone in their chunk. Last slices count only with
        ``stores_last_slice``. All other K and V are saved with their chunk.
        """
        return self._kept[stores_last_slice]

    def loose_tokens(self, stores_last_slice: bool) -> np.ndarray:
        """Return [C] tokens that :meth:`cached_tokens` does not count."""
        return self._loose[stores_last_slice]

    @cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Results of :meth:`cached_tokens` without last slices, and with last slices."""
        alone = self.tokens == self.cut_tokens
        slices = self.later >= 0, self.document >= 0
        but_last, with_last = (np.where(at & alone, self.cut_tokens, 0.0) for at in slices)
        return but_last, with_last

    @cached_property
    def _loose(self) -> tuple[np.ndarray, np.ndarray]:
        but_last, with_last = self._kept
        return self.tokens - but_last, self.tokens - with_last

    @cached_property
    def features(self) -> dict[Hashable, np.ndarray]:
        """Cache of the results of Columns.features, by additional columns."""
        return {}

    @cached_property
    def earlier_tokens(self) -> np.ndarray:
        """[C] tokens of the cut document before the chunk's slice: the context of the slice."""
        chunk, start, _ = self.spans  # only a slice of a cut document has a start above 0
        return np.bincount(chunk, weights=start, minlength=self.chunks)

    @cached_property
    def boundaries(self) -> np.ndarray:
        """[D] number of boundaries between slices of each document; 0 for an uncut document."""
        return np.bincount(self.document[self.later >= 0], minlength=len(self.lengths))

    @property
    def context_tokens(self) -> np.ndarray:
        """[D] number of tokens before each document's last slice, to which later slices attend.

        The number is 0 for an uncut document.
        """
        context = np.zeros(len(self.lengths))
        last = (self.document >= 0) & (self.later < 0)
        documents = self.document[last]
        context[documents] = self.lengths[documents] - self.cut_tokens[last]
        return context


@dataclass(frozen=True)
class JoinedLoads(Loads):
    """Loads of several lists of chunks, concatenated; ``joined`` contains the original loads."""

    joined: tuple[Loads, ...]

    @property
    def parts(self) -> tuple[Loads, ...]:
        """The original loads."""
        return self.joined


def join_loads(loads: Sequence[Loads]) -> JoinedLoads:
    """Return ``loads`` concatenated; each must cache K and V of cut documents only."""
    chunks = np.cumsum([0] + [each.chunks for each in loads])
    documents = np.cumsum([0] + [len(each.lengths) for each in loads])

    def moved(name: str, by: np.ndarray) -> np.ndarray:
        every = [getattr(each, name) for each in loads]
        return np.concatenate(
            [np.where(row >= 0, row + at, -1) for row, at in zip(every, by[:-1], strict=True)]
        )

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(each, name) for each in loads])

    local = None
    ranks = max(1 if each.local is None else each.local.ranks for each in loads)
    if ranks > 1:
        rank, tokens = zip(
            *(
                (np.full(len(each.spans[0]), ALL_RANKS), np.zeros(each.chunks))
                if each.local is None
                else (each.local.rank, each.local.tokens)
                for each in loads
            ),
            strict=True,
        )
        local = LocalSpans(np.concatenate(rank), ranks, np.concatenate(tokens))
    begins = np.repeat(chunks[:-1], [len(each.spans[0]) for each in loads])
    chunk, start, stop = (
        np.concatenate(each) for each in zip(*(each.spans for each in loads), strict=True)
    )
    return JoinedLoads(
        tokens=joined("tokens"),
        pairs=joined("pairs"),
        cut_tokens=joined("cut_tokens"),
        document=moved("document", documents),
        earlier=moved("earlier", chunks),
        later=moved("later", chunks),
        lengths=joined("lengths"),
        spans=(chunk + begins, start, stop),
        joined=tuple(loads),
        local=local,
    )


@dataclass(frozen=True)
class TreeLoads(Loads):
    """Loads of a plan in which some documents continue other documents (shared prefixes).

    ``spans`` contains positions; those of a branch begin where the document's prefix ends.

    Attributes:
        boundaries_of: for each document, ends of spans that later spans or branches attend to.
        lone: [C], tokens of the chunk if its only span is of a cached document, else 0.
        read: [C], ``lone`` if other spans attend to these tokens, else 0.
    """

    boundaries_of: tuple[tuple[int, ...], ...] = field(kw_only=True)
    lone: np.ndarray = field(kw_only=True)
    read: np.ndarray = field(kw_only=True)

    def tail_tokens(self, window: int) -> np.ndarray:
        """Return, for each document, the number of tokens that later spans attend to: [D]."""
        if not window:
            return self.context_tokens
        slices = (np.diff((0, *boundaries)) for boundaries in self.boundaries_of)
        return np.array([np.minimum(each, window - 1).sum() for each in slices], np.float64)

    @cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read, self.lone

    @cached_property
    def boundaries(self) -> np.ndarray:
        """[D] number of entries of ``boundaries_of`` for each document."""
        return np.array([len(each) for each in self.boundaries_of])

    @property
    def context_tokens(self) -> np.ndarray:
        """[D] number of each document's tokens to which later spans or other documents attend."""
        return np.array([max(each, default=0) for each in self.boundaries_of], np.float64)


def padded(tokens: np.ndarray, multiple: int) -> np.ndarray:
    """Return ``tokens`` rounded up to multiples of ``multiple``."""
    return -(-tokens // multiple) * multiple


def loads_of_plan(plan: Plan, ranks: int, multiple: int = 1) -> Loads:
    """Return the loads of a plan's chunks on ``ranks`` context-parallel ranks.

    Chunks are padded to multiples of ``multiple`` tokens.

    Raises:
        PlanError: the chunks do not compute every token of the documents once.
    """
    slices = slices_of(plan)
    return plan_loads(plan.chunks, plan.documents, slices, ranks, multiple, plan.prefixes)


def _tree_loads(
    loads: Loads, chunks: Sequence[Chunk], slices: Slices, prefixes: Prefixes
) -> TreeLoads:
    """Return ``loads`` of chunks whose documents have ``prefixes``."""
    offset = offsets_of(prefixes)
    begins = np.array([offset[s.document] for chunk in chunks for s in chunk.spans], np.int64)
    chunk, start, stop = loads.spans
    boundaries = {each.document: each.boundaries for each in slices.kept}
    lone, read = np.zeros((2, loads.chunks))
    for number, content in enumerate(chunks):
        if len(content.spans) == 1 and (span := content.spans[0]).document in boundaries:
            lone[number] = span.tokens
            read[number] = span.tokens * (span.stop <= boundaries[span.document][-1])
    own = {each.name: getattr(loads, each.name) for each in fields(Loads)}
    before = loads.over_chunks(begins * (stop - start))
    moved = {"pairs": loads.pairs + before, "spans": (chunk, start + begins, stop + begins)}
    return TreeLoads(
        **own | moved | {"kept": slices.kept},
        boundaries_of=tuple(boundaries.get(d, ()) for d in range(len(loads.lengths))),
        lone=lone,
        read=read,
    )


def pairs_before(position: np.ndarray | float, window: int) -> np.ndarray:
    """Return the pairs of the first ``position`` queries, each with at most ``window`` keys."""
    position = np.asarray(position, np.float64)
    inside = np.minimum(position, window)
    return inside * (inside + 1) / 2 + window * (position - inside)


def pairs_within(spans: Iterable[Span], window: int) -> int:
    """Return the pairs of ``spans`` with at most ``window`` keys per query; 0: no limit."""
    if not window:
        return sum(span.pairs for span in spans)
    return sum(
        int(pairs_before(span.stop, window) - pairs_before(span.start, window)) for span in spans
    )


def plan_loads(
    chunks: Sequence[Chunk],
    documents: Sequence[int],
    slices: Slices | None = None,
    ranks: int = 1,
    multiple: int = 1,
    prefixes: Prefixes = (),
) -> Loads:
    """Return the loads of ``chunks``, whose spans are tokens of ``documents``.

    Args:
        chunks: chunks of the plan.
        documents: tokens of each document.
        slices: slices of the chunks; None: computed from the chunks and documents.
        ranks: context-parallel size.
        multiple: chunks are padded to a multiple of this many tokens.
        prefixes: prefixes of the documents, as in a plan.

    Raises:
        PlanError: the chunks do not compute every token of the documents once.
    """
    slices = slices_in(documents, chunks, prefixes) if slices is None else slices
    cut_tokens = [
        0 if document < 0 else next(s.tokens for s in chunk.spans if s.document == document)
        for chunk, document in zip(chunks, slices.document, strict=True)
    ]
    spans = [
        (number, span.start, span.stop)
        for number, chunk in enumerate(chunks)
        for span in chunk.spans
    ]
    of, start, stop = np.array(spans, np.int64).reshape(-1, 3).T
    tokens = np.array([chunk.tokens for chunk in chunks], np.float64)
    pairs = np.array([chunk.pairs for chunk in chunks], np.float64)
    rank = np.array([span.rank for chunk in chunks for span in chunk.spans], np.int64)
    local = local_of(of, rank, stop - start, ranks, len(chunks))
    if local is not None:
        tokens = over_ranks(of, rank, stop - start, ranks, len(chunks))
        all_pairs = np.array([span.pairs for chunk in chunks for span in chunk.spans], np.float64)
        pairs = over_ranks(of, rank, all_pairs, ranks, len(chunks))
    loads = Loads(
        tokens=padded(tokens, multiple),
        pairs=pairs,
        cut_tokens=np.array(cut_tokens, np.float64),
        document=np.array(slices.document, np.int64),
        earlier=np.array(slices.earlier, np.int64),
        later=np.array(slices.later, np.int64),
        # Chunks without a cut document have index -1, which must exist even without documents.
        lengths=np.array(list(documents) or [0], np.float64),
        spans=(of, start, stop),
        local=local,
    )
    return _tree_loads(loads, chunks, slices, prefixes) if prefixes else loads
