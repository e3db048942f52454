"""The load of a chunk: what a stage's time and memory depend on."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from megatron_epp.ir import (
    ALL_RANKS,
    CachedDocument,
    Chunk,
    Plan,
    Slices,
    Span,
    slices_in,
    slices_of,
)


@dataclass(frozen=True, slots=True)
class LocalSpans:
    """Spans that one context-parallel rank computes alone, and the rows of chunks that are theirs.

    rank     of every span of the loads, ALL_RANKS or the rank
    ranks    how many there are
    tokens   [C] rows that are not exchanged: as many times as there are ranks those of the fullest
    """

    rank: np.ndarray
    ranks: int
    tokens: np.ndarray


def local_of(
    chunk: np.ndarray, rank: np.ndarray, tokens: np.ndarray, ranks: int, chunks: int
) -> LocalSpans | None:
    """The local part of ``chunks``, from their spans' arrays; None where nothing is local."""
    if ranks == 1 or not (rank >= 0).any():
        return None
    there = np.where(rank >= 0, tokens, 0)
    return LocalSpans(rank, ranks, over_ranks(chunk, rank, there, ranks, chunks))


def over_ranks(
    chunk: np.ndarray, rank: np.ndarray, amount: np.ndarray, ranks: int, chunks: int
) -> np.ndarray:
    """[C] of an ``amount`` of every span what the devices of a stage take together as long as the
    busiest works: all of what is spread, and of the rest as often as there are ranks the most that
    one has."""
    over_all = np.bincount(chunk, weights=np.where(rank >= 0, 0, amount), minlength=chunks)
    at = rank >= 0
    place = chunk[at] * ranks + rank[at]
    each = np.bincount(place, weights=amount[at], minlength=chunks * ranks)
    return over_all + ranks * each.reshape(chunks, ranks).max(axis=1)


@dataclass(frozen=True)  # no slots: what every coefficient of the cost asks for is computed once
class Loads:
    """Arrays over the chunks [C] of one plan, and over its documents [D].

    tokens, pairs     inputs, and query-key pairs of queries that see all before them
    cut_tokens        inputs of the chunk's slice of a cut document (0 where it has none)
    document          the cut document of that slice, or -1
    earlier, later    the chunks with the slices before and after, or -1
    lengths           [D] inputs of the documents
    spans             (chunk, start, stop) of every span, as arrays; what windows see follows
    local             None: every span is spread over the context-parallel ranks. Else tokens and
                      pairs are those that the busiest rank makes of a chunk, times the ranks
    kept              None: documents whose K and V are kept are the cut ones
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
        return len(self.tokens)

    @property
    def parts(self) -> "tuple[Loads, ...]":
        """The loads that these are joined of; mostly these alone."""
        return (self,)

    def over_chunks(self, amount: np.ndarray) -> np.ndarray:
        """[C] sums of an ``amount`` of every span; of local spans as :func:`over_ranks`."""
        chunk = self.spans[0]
        if self.local is not None:
            return over_ranks(chunk, self.local.rank, amount, self.local.ranks, self.chunks)
        return np.bincount(chunk, weights=amount, minlength=self.chunks)

    def tail_tokens(self, window: int) -> np.ndarray:
        """[D] inputs of a cut document that later slices attend to through a window: before every
        border as many as the window reaches back, none of them twice. 0: through none."""
        if not window:
            return self.context_tokens
        boundary = self.later >= 0
        tails = np.minimum(self.cut_tokens[boundary], window - 1)
        return np.bincount(self.document[boundary], weights=tails, minlength=len(self.lengths))

    def cached_tokens(self, stores_last_slice: bool) -> np.ndarray:
        """[C] inputs whose K and V lie in their document's buffer and are not saved besides: of
        lone slices, but of the last only with ``stores_last_slice``. What else is in the chunk is
        saved with it."""
        return self._kept[stores_last_slice]

    def loose_tokens(self, stores_last_slice: bool) -> np.ndarray:
        """[C] the other inputs."""
        return self._loose[stores_last_slice]

    @cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Without the last slices', and with them."""
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
        """Features as layouts have computed them, by their further columns."""
        return {}

    @cached_property
    def earlier_tokens(self) -> np.ndarray:
        """[C] inputs of the chunk's cut document before its slice: the context of that slice."""
        chunk, start, _ = self.spans  # of its spans only that slice begins inside a document
        return np.bincount(chunk, weights=start, minlength=self.chunks)

    @cached_property
    def boundaries(self) -> np.ndarray:
        """[D] borders of a document between one slice and the next; 0 of a whole document."""
        return np.bincount(self.document[self.later >= 0], minlength=len(self.lengths))

    @property
    def context_tokens(self) -> np.ndarray:
        """[D] inputs of a cut document that a later slice attends to: all but its last slice; 0
        for a whole document."""
        context = np.zeros(len(self.lengths))
        last = (self.document >= 0) & (self.later < 0)
        documents = self.document[last]
        context[documents] = self.lengths[documents] - self.cut_tokens[last]
        return context


@dataclass(frozen=True)
class JoinedLoads(Loads):
    """Loads of several chunkings, one after the other; ``joined`` as they were."""

    joined: tuple[Loads, ...]

    @property
    def parts(self) -> tuple[Loads, ...]:
        return self.joined


def join_loads(loads: Sequence[Loads]) -> JoinedLoads:
    """Join ``loads`` of documents that keep nothing but what cut ones do."""
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
    """Loads where documents continue others, of whose inputs they begin at the position behind:
    ``spans`` has positions, and ``boundaries_of[d]`` those within document d that others attend to.

    lone   [C] inputs of the chunk where they are one span of a kept document, else 0
    read   [C] of those, inputs that others attend to
    """

    boundaries_of: tuple[tuple[int, ...], ...] = field(kw_only=True)
    lone: np.ndarray = field(kw_only=True)
    read: np.ndarray = field(kw_only=True)

    def tail_tokens(self, window: int) -> np.ndarray:
        if not window:
            return self.context_tokens
        slices = (np.diff((0, *boundaries)) for boundaries in self.boundaries_of)
        return np.array([np.minimum(each, window - 1).sum() for each in slices], np.float64)

    @cached_property
    def _kept(self) -> tuple[np.ndarray, np.ndarray]:
        return self.read, self.lone

    @cached_property
    def boundaries(self) -> np.ndarray:
        return np.array([len(each) for each in self.boundaries_of])

    @property
    def context_tokens(self) -> np.ndarray:
        return np.array([max(each, default=0) for each in self.boundaries_of], np.float64)


def padded(tokens: np.ndarray, multiple: int) -> np.ndarray:
    """Return ``tokens`` rounded up to a multiple."""
    return -(-tokens // multiple) * multiple


def loads_of_plan(plan: Plan, ranks: int, multiple: int = 1) -> Loads:
    """The loads of a plan's chunks on so many context-parallel ``ranks``, padded to a multiple."""
    slices = slices_of(plan)
    loads = plan_loads(plan.chunks, plan.documents, slices, ranks, multiple)
    if not plan.prefixes:
        return loads
    offset = [plan.offset(document) for document in range(len(plan.documents))]
    begins = np.array([offset[s.document] for chunk in plan.chunks for s in chunk.spans], np.int64)
    chunk, start, stop = loads.spans
    before = begins * (stop - start)
    if loads.local is None:
        before = np.bincount(chunk, weights=before, minlength=loads.chunks)
    else:
        before = over_ranks(chunk, loads.local.rank, before, ranks, loads.chunks)
    boundaries = {each.document: each.boundaries for each in slices.kept}
    lone, read = np.zeros((2, loads.chunks))
    for number, content in enumerate(plan.chunks):
        if len(content.spans) == 1 and (span := content.spans[0]).document in boundaries:
            lone[number] = span.tokens
            read[number] = span.tokens * (span.stop <= boundaries[span.document][-1])
    own = {each.name: getattr(loads, each.name) for each in fields(Loads)}
    moved = {"pairs": loads.pairs + before, "spans": (chunk, start + begins, stop + begins)}
    return TreeLoads(
        **own | moved | {"kept": slices.kept},
        boundaries_of=tuple(boundaries.get(d, ()) for d in range(len(plan.documents))),
        lone=lone,
        read=read,
    )


def pairs_before(position: np.ndarray | float, window: int) -> np.ndarray:
    """Query-key pairs of a document's first ``position`` queries, each of which sees ``window``
    keys at most."""
    position = np.asarray(position, np.float64)
    inside = np.minimum(position, window)
    return inside * (inside + 1) / 2 + window * (position - inside)


def pairs_within(spans: Iterable[Span], window: int) -> int:
    """Query-key pairs of ``spans`` where a query sees at most ``window`` keys; 0: all before it."""
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
) -> Loads:
    """The loads of ``chunks`` of ``documents`` on so many context-parallel ``ranks``; a PlanError
    where they do not cover each other. Chunks are padded to a ``multiple`` of tokens."""
    slices = slices_in(documents, chunks) if slices is None else slices
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
    return Loads(
        tokens=padded(tokens, multiple),
        pairs=pairs,
        cut_tokens=np.array(cut_tokens, np.float64),
        document=np.array(slices.document, np.int64),
        earlier=np.array(slices.earlier, np.int64),
        later=np.array(slices.later, np.int64),
        # Chunks without a cut document have index -1, which is to be there without documents, too.
        lengths=np.array(list(documents) or [0], np.float64),
        spans=(of, start, stop),
        local=local,
    )
