"""Cutting documents into slices of equal time.

A slice late in its document attends to more, so slices of equal time get shorter in tokens.
Documents are handled sorted, longest first: what a planner finds cannot depend on their order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.columns import Column
from megatron_epp.cost.loads import pairs_before


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a chunk on an average stage, forward and backward together.

    time = token_seconds * tokens + pair_seconds * pairs + chunk_seconds

    and besides, where the stages have layers with windows or other further columns:

    window_seconds    (window, seconds per pair that it leaves), narrowest first
    column_seconds    (column, seconds per unit) of the others
    exchange_seconds  of token_seconds what exchanging rows for heads takes; a document that one
                      context-parallel rank computes alone does without
    host_ops          (fraction of the seconds that an op takes, seconds that the host takes to
                      issue it) of forward and backward; none where hosts take nothing
    """

    token_seconds: float
    pair_seconds: float
    chunk_seconds: float
    window_seconds: tuple[tuple[int, float], ...] = ()
    column_seconds: tuple[tuple[Column, float], ...] = ()
    exchange_seconds: float = 0.0
    host_ops: tuple[tuple[float, float], ...] = ()

    @property
    def host_seconds(self) -> float:
        """Seconds of a chunk below which the host takes longer for one of its ops."""
        return max((host / fraction for fraction, host in self.host_ops), default=0.0)

    def seconds(self, tokens, pairs):
        """Seconds of tokens and of pairs without a window, without the constant of a chunk; numbers
        or arrays."""
        return self.token_seconds * tokens + self.pair_seconds * pairs

    def span_seconds(self, spans: "Spans") -> np.ndarray:
        """Seconds of each span, without the constant of a chunk."""
        taken = self.seconds(spans.tokens, spans.pairs)
        if not (self.window_seconds or self.column_seconds):
            return taken
        return taken + self._besides(spans)

    def chunk_spans_seconds(
        self, spans: "Spans", chunk: np.ndarray, tokens: np.ndarray, pairs: np.ndarray
    ) -> np.ndarray:
        """Seconds of each chunk, without its constant; ``chunk``: the one that each span is in."""
        taken = self.seconds(tokens, pairs)
        if not (self.window_seconds or self.column_seconds):
            return taken
        return taken + np.bincount(chunk, weights=self._besides(spans), minlength=len(tokens))

    def _besides(self, spans: "Spans") -> np.ndarray:
        besides = np.zeros(len(spans.start))
        for column, seconds in self.column_seconds:
            besides = besides + seconds * column.of_spans(spans.start, spans.stop)
        for window, seconds in self.window_seconds:
            pairs = pairs_before(spans.stop, window) - pairs_before(spans.start, window)
            besides = besides + seconds * pairs
        return besides

    def document_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of whole documents, each attending to itself."""
        lengths = lengths.astype(np.float64)
        taken = self.window_document_seconds(lengths)
        for column, seconds in self.column_seconds:
            taken = taken + seconds * column.of_spans(np.zeros_like(lengths), lengths)
        return taken

    def window_document_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Those of tokens and pairs alone."""
        taken = self.seconds(lengths, lengths * (lengths + 1) / 2)
        for window, seconds in self.window_seconds:
            taken = taken + seconds * pairs_before(lengths, window)
        return taken

    def reach(self, seconds: np.ndarray) -> np.ndarray:
        """Tokens of a document that are done after ``seconds``: the inverse of
        :meth:`window_document_seconds`."""
        half = self.pair_seconds / 2 + sum(each for _, each in self.window_seconds) / 2
        tokens = _root(half, self.token_seconds + half, seconds)
        # Behind a window what its layers take grows in proportion: from there on another parabola.
        linear, before = self.token_seconds + half, 0.0
        for window, each in self.window_seconds:
            # Pairs become window * x - window * (window - 1) / 2 of x tokens.
            half, linear = half - each / 2, linear + each * (window - 0.5)
            before += each * (window - 1.0) * window / 2
            far = _root(half, linear, seconds + before)
            tokens = np.where(tokens > window, far, tokens)
        return tokens


def _root(half: float, linear: float, seconds: np.ndarray) -> np.ndarray:
    """Where half * x^2 + linear * x is ``seconds``."""
    # Stable where half is nearly nothing: 2c / (b + sqrt(b^2 + 4ac)).
    return 2 * seconds / (linear + np.sqrt(linear * linear + 4 * half * seconds))


def equal_points(length: int, slices: int, rates: Rates, multiple: int = 1) -> np.ndarray:
    """Where a document of ``length`` is cut into ``slices`` of equal time: slices + 1 points.

    Inner points are multiples of ``multiple``, so that padding is paid once per document. Where a
    document is too short for so many slices it gets fewer.
    """
    total = rates.window_document_seconds(np.array([length], np.float64))[0]
    inner = rates.reach(total * np.arange(1, slices) / slices)
    inner = np.rint(inner / multiple).astype(np.int64) * multiple
    inner = np.unique(inner[(inner > 0) & (inner < length)])
    return np.concatenate(([0], inner, [length])).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of documents as arrays, one entry a span: its document, start and stop."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        return self.stop - self.start

    @property
    def pairs(self) -> np.ndarray:
        """As ir.Span.pairs."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, which: np.ndarray) -> "Spans":
        return Spans(self.document[which], self.start[which], self.stop[which])

    def __add__(self, others: "Spans") -> "Spans":
        """Return these, and then the others."""
        pairs = ((getattr(self, name), getattr(others, name)) for name in self.__slots__)
        return Spans(*map(np.concatenate, pairs))


@dataclass(frozen=True, slots=True)
class Cuts:
    """Documents cut into slices, the pieces sorted by what becomes of them.

    slices   all slices of cut documents but the last of each, in order: chunks of their own
    tails    the last slice of every cut document
    shorts   documents that stay whole, longest first
    """

    slices: Spans
    tails: Spans
    shorts: Spans


def cut_at(lengths: np.ndarray, points: np.ndarray) -> Cuts:
    """Alg. 1, line 2: every document longer than the first slice is cut at the same ``points``.

    lengths   sorted, longest first; points: 0, then rising, the last at least the longest length
    """
    return _cuts(lengths, [points[points < length] for length in lengths[lengths > points[1]]])


def cut_each(
    lengths: np.ndarray, target_seconds: float, rates: Rates, most_tokens: int, multiple: int = 1
) -> Cuts:
    """Every document that takes longer than about ``target_seconds`` in slices equal in time.

    Each document has its own points: as many slices as bring the slice nearest to the target, and
    no slice of more than ``most_tokens``.
    """
    seconds = rates.document_seconds(lengths)
    inner = []
    for length, taken in zip(lengths, seconds, strict=True):
        slices = max(1, round(taken / target_seconds))
        if slices == 1 and length <= most_tokens:
            break  # the rest is shorter
        points = equal_points(length, slices, rates, multiple)
        while np.diff(points).max() > most_tokens and slices < length:
            slices += 1
            points = equal_points(length, slices, rates, multiple)
        if len(points) == 2:
            break
        inner.append(points[:-1])
    return _cuts(lengths, inner)


Cutter = Callable[[np.ndarray, float, Rates, int, int], Cuts]  # :func:`cut_each`


def remembered(cutter: Cutter = cut_each) -> Cutter:
    """Return ``cutter`` for one batch, which is given its longest documents: each cut once."""
    known: dict[tuple[int, float], Cuts] = {}

    def cut(
        lengths: np.ndarray, target_seconds: float, rates: Rates, most_tokens: int, multiple: int
    ) -> Cuts:
        key = len(lengths), target_seconds
        if key not in known:
            known[key] = cutter(lengths, target_seconds, rates, most_tokens, multiple)
        return known[key]

    return cut


def _cuts(lengths: np.ndarray, starts: list[np.ndarray]) -> Cuts:
    """``starts[d]``: where the slices of the d-th longest document begin."""
    counts = np.array([len(points) for points in starts], dtype=np.int64)
    document = np.repeat(np.arange(len(starts)), counts)
    start = np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)
    stop = np.empty_like(start)
    stop[:-1] = start[1:]
    last = np.cumsum(counts) - 1
    stop[last] = lengths[: len(starts)]
    is_last = np.zeros(len(start), dtype=bool)
    is_last[last] = True
    uncut, cut = np.arange(len(starts), len(lengths)), Spans(document, start, stop)
    shorts = Spans(uncut, np.zeros_like(uncut), lengths[uncut])
    return Cuts(cut[~is_last], cut[is_last], shorts)


# Finer chunks than this many per stage shorten the ramps by less than 4% of the iteration, and
# real kernels lose more than that on them than a constant per chunk tells. In deep pipelines so
# many would not be worth their planning either.
MOST_CHUNKS_PER_STAGE = 24
MANY_CHUNKS = 256
COUNTS_TRIED = 64  # of chunks, where hosts take their time
MOST_CHUNKS_PER_STAGE_OF_MANY = 6


def ideal_chunks(total_seconds: float, rates: Rates, stages: int) -> float:
    """How many equal chunks take least: constants grow with their number, ramps shrink with it.

    n chunks cost n * chunk_seconds and (stages - 1) * total_seconds / n. Where hosts take their
    time the iteration of n + stages - 1 chunks is looked for that takes least: an op takes what its
    host takes at least, so that more of them cost time and shorten nothing.
    """
    most = min(
        MOST_CHUNKS_PER_STAGE * stages,
        max(MANY_CHUNKS, MOST_CHUNKS_PER_STAGE_OF_MANY * stages),
    )
    least = max(1, stages - 1) * total_seconds / most**2
    ideal = float(np.sqrt(max(1, stages - 1) * total_seconds / max(rates.chunk_seconds, least)))
    if not rates.host_ops:
        return ideal
    counts = np.geomspace(1.0, max(ideal, 1.0), COUNTS_TRIED)
    each = rates.chunk_seconds + sum(
        np.maximum(host, fraction * total_seconds / counts) for fraction, host in rates.host_ops
    )
    return float(counts[np.argmin((counts + stages - 1) * each)])
