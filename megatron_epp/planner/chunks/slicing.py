"""Slicing of documents into slices of equal time.

A late slice attends to more tokens, so it has fewer tokens than an early slice of equal time.
Documents are sorted, longest first, so that a plan does not depend on the order of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.columns import Column
from megatron_epp.cost.loads import pairs_before


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a chunk on an average stage, forward and backward together.

        seconds = token_seconds * tokens + pair_seconds * pairs + chunk_seconds

    Some layers add seconds (``window_seconds`` and ``column_seconds``).

    Attributes:
        token_seconds: seconds per token.
        pair_seconds: seconds per query-key pair.
        chunk_seconds: seconds per chunk.
        window_seconds: for each sliding window, its size in tokens and the seconds per query-key
            pair within it; narrowest first.
        column_seconds: for each other quantity that takes time (:mod:`megatron_epp.cost.columns`),
            its column and the seconds per unit.
        exchange_seconds: part of ``token_seconds`` for all-to-all between context-parallel ranks.
            A document that one rank computes alone does not need this part.
        host_ops: for F, then for B: the op's fraction of a chunk's seconds, and the host's seconds
            to issue the op; () if the host time is not modeled.
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
        """Least seconds of a chunk whose ops all take at least the host's time to issue them."""
        return max((host / fraction for fraction, host in self.host_ops), default=0.0)

    def seconds(self, tokens, pairs):
        """Return the seconds of ``tokens`` and query-key ``pairs``, which are numbers or arrays.

        The result excludes ``chunk_seconds``, ``window_seconds`` and ``column_seconds``.
        """
        return self.token_seconds * tokens + self.pair_seconds * pairs

    def span_seconds(self, spans: "Spans") -> np.ndarray:
        """Return the seconds of each span, without ``chunk_seconds``."""
        taken = self.seconds(spans.tokens, spans.pairs)
        if not (self.window_seconds or self.column_seconds):
            return taken
        return taken + self._besides(spans)

    def chunk_spans_seconds(
        self, spans: "Spans", chunk: np.ndarray, tokens: np.ndarray, pairs: np.ndarray
    ) -> np.ndarray:
        """Return the seconds [chunks] of each chunk, without ``chunk_seconds``.

        Args:
            spans: spans of documents in all chunks.
            chunk: [spans] index of the chunk of every span.
            tokens: [chunks] number of tokens of every chunk.
            pairs: [chunks] number of query-key pairs of every chunk.
        """
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
        """Return the seconds of unsliced documents, without ``chunk_seconds``."""
        lengths = lengths.astype(np.float64)
        taken = self.window_document_seconds(lengths)
        for column, seconds in self.column_seconds:
            taken = taken + seconds * column.of_spans(np.zeros_like(lengths), lengths)
        return taken

    def window_document_seconds(self, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds of unsliced documents, without columns and ``chunk_seconds``."""
        taken = self.seconds(lengths, lengths * (lengths + 1) / 2)
        for window, seconds in self.window_seconds:
            taken = taken + seconds * pairs_before(lengths, window)
        return taken

    def reach(self, seconds: np.ndarray) -> np.ndarray:
        """Return the length of a document whose :meth:`window_document_seconds` are ``seconds``."""
        half = self.pair_seconds / 2 + sum(each for _, each in self.window_seconds) / 2
        tokens = _root(half, self.token_seconds + half, seconds)
        # Beyond a window the seconds of its layers grow linearly, so the parabola changes.
        linear, before = self.token_seconds + half, 0.0
        for window, each in self.window_seconds:
            # x tokens have window * x - window * (window - 1) / 2 pairs.
            half, linear = half - each / 2, linear + each * (window - 0.5)
            before += each * (window - 1.0) * window / 2
            far = _root(half, linear, seconds + before)
            tokens = np.where(tokens > window, far, tokens)
        return tokens


def _root(half: float, linear: float, seconds: np.ndarray) -> np.ndarray:
    """Return the x that satisfies half * x^2 + linear * x = ``seconds``."""
    # Numerically stable for half near 0: 2c / (b + sqrt(b^2 + 4ac)).
    return 2 * seconds / (linear + np.sqrt(linear * linear + 4 * half * seconds))


def equal_points(length: int, slices: int, rates: Rates, multiple: int = 1) -> np.ndarray:
    """Return the boundaries [slices + 1] of slices of equal time, from 0 to ``length``.

    If the document is too short, there are fewer slices. ``rates.column_seconds`` are ignored.

    Args:
        length: number of tokens of the document.
        slices: number of slices.
        rates: seconds per token, query-key pair and chunk.
        multiple: number of tokens; inner boundaries are multiples of it, so that at most the last
            slice is padded.
    """
    total = rates.window_document_seconds(np.array([length], np.float64))[0]
    inner = rates.reach(total * np.arange(1, slices) / slices)
    inner = np.rint(inner / multiple).astype(np.int64) * multiple
    inner = np.unique(inner[(inner > 0) & (inner < length)])
    return np.concatenate(([0], inner, [length])).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of documents as arrays, one entry per span."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of every span."""
        return self.stop - self.start

    @property
    def pairs(self) -> np.ndarray:
        """Query-key pairs of causal attention of every span, as in ``ir.Span.pairs``."""
        return (self.stop * (self.stop + 1) - self.start * (self.start + 1)) // 2

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, which: np.ndarray) -> "Spans":
        return Spans(self.document[which], self.start[which], self.stop[which])

    def __add__(self, others: "Spans") -> "Spans":
        pairs = ((getattr(self, name), getattr(others, name)) for name in self.__slots__)
        return Spans(*map(np.concatenate, pairs))


@dataclass(frozen=True, slots=True)
class Cuts:
    """Documents after slicing: slices, tails and unsliced documents.

    Attributes:
        slices: all slices except the last one of each sliced document.
        tails: last slice of every sliced document.
        shorts: unsliced documents, longest first.
    """

    slices: Spans
    tails: Spans
    shorts: Spans


def cut_at(lengths: np.ndarray, points: np.ndarray) -> Cuts:
    """Slice all documents longer than ``points[1]`` tokens at the same ``points``.

    Source: InfiniPipe's Alg. 1, line 2.

    Args:
        lengths: [documents] document lengths in tokens, in descending order.
        points: [slices + 1] ascending positions from 0 to at least the longest length.
    """
    return _cuts(lengths, [points[points < length] for length in lengths[lengths > points[1]]])


def cut_each(
    lengths: np.ndarray, target_seconds: float, rates: Rates, most_tokens: int, multiple: int = 1
) -> Cuts:
    """Slice each document by its own boundaries into slices of equal time.

    A document has as many slices as its time divided by ``target_seconds``, rounded, or more if a
    slice would exceed ``most_tokens``. With one slice, it stays uncut.

    Args:
        lengths: [documents] document lengths in tokens, in descending order.
        target_seconds: seconds of a slice.
        rates: seconds per token, query-key pair and chunk.
        most_tokens: maximum number of tokens of a slice.
        multiple: number of tokens; inner boundaries are multiples of it.
    """
    seconds = rates.document_seconds(lengths)
    inner = []
    for length, taken in zip(lengths, seconds, strict=True):
        slices = max(1, round(taken / target_seconds))
        if slices == 1 and length <= most_tokens:
            break  # the remaining documents are shorter
        points = equal_points(length, slices, rates, multiple)
        while np.diff(points).max() > most_tokens and slices < length:
            slices += 1
            points = equal_points(length, slices, rates, multiple)
        if len(points) == 2:
            break
        inner.append(points[:-1])
    return _cuts(lengths, inner)


Cutter = Callable[[np.ndarray, float, Rates, int, int], Cuts]


def remembered(cutter: Cutter = cut_each) -> Cutter:
    """Return ``cutter`` with a cache of its results by document count and target.

    The documents of every call must be the longest ones of one batch; their number may differ. All
    other arguments must be the same in all calls.
    """
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
    """Return slices, tails and unsliced documents; slices of document d begin at ``starts[d]``."""
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


# More chunks per stage would shorten warm-up and cool-down by less than 4% of the iteration. Real
# kernels lose more than 4% on smaller chunks, in addition to the constant per chunk. In deep
# pipelines, more chunks would not be worth the planning time either.
MOST_CHUNKS_PER_STAGE = 24
MANY_CHUNKS = 256
COUNTS_TRIED = 64  # numbers of chunks tried if hosts take time
MOST_CHUNKS_PER_STAGE_OF_MANY = 6


def ideal_chunks(total_seconds: float, rates: Rates, stages: int) -> float:
    """Return the number of equal chunks, up to a limit, that minimizes the iteration's time.

    n chunks add n * chunk_seconds, plus (stages - 1) * total_seconds / n for warm-up and cool-down.
    If ``rates.host_ops`` are known, several n are tried. Their time is that of n + stages - 1 equal
    chunks, in which each op takes at least the host's seconds to issue it.

    Args:
        total_seconds: seconds of a replica's documents on an average stage.
        rates: seconds per token, query-key pair and chunk.
        stages: number of stages.
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
