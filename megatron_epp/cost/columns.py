"""Columns: quantities of a chunk; the seconds of an op are a linear function of them.

Every layer has the columns tokens, query-key pairs and 1. A layer kind adds columns as subclasses
of :class:`Column` and lists them in :attr:`Part.COLUMNS <megatron_epp.cost.kinds.base.Part>`. A
profile then contains the seconds per unit of these columns (``LayerCoefficients.column_seconds``).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from megatron_epp.cost.loads import Loads, pairs_before
from megatron_epp.ir import Span

TOKENS, PAIRS, CHUNKS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Column(ABC):
    """Quantity of a span of a document, summed over the spans of a chunk.

    Attributes:
        NAME: name of the column in profile files; ``size`` follows the name.
        FITTED: whether measurements can separate the column's seconds from those of tokens and
            pairs.
        size: parameter of the column, such as the keys of a window; 0 if it has none.
    """

    NAME: ClassVar[str]
    FITTED: ClassVar[bool] = True
    size: int = 0

    def __str__(self) -> str:
        """Return the column's name in profile files."""
        return f"{self.NAME} {self.size}" if self.size else self.NAME

    @abstractmethod
    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the quantity of each span: tokens [``start``, ``stop``) of a document."""

    def of(self, spans: Iterable[Span]) -> float:
        """Return the quantity of a chunk with these ``spans``."""
        start, stop = np.array([(span.start, span.stop) for span in spans]).reshape(-1, 2).T
        return float(self.of_spans(start, stop).sum())

    def of_chunks(self, loads: Loads) -> np.ndarray:
        """Return the quantity of each chunk, [C]."""
        return loads.over_chunks(self.of_spans(*loads.spans[1:]))


@dataclass(frozen=True, slots=True)
class WindowPairs(Column):
    """Query-key pairs if a query attends to at most ``size`` keys, its own included.

    Measured profiles include the seconds of these pairs in the seconds of all pairs.
    """

    NAME, FITTED = "window_pairs", False

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the pairs of every span."""
        return pairs_before(stop, self.size) - pairs_before(start, self.size)


@dataclass(frozen=True, slots=True)
class ContextTokens(Column):
    """Context tokens: for a slice, the tokens of its document before the slice."""

    NAME = "context_tokens"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the tokens before every span."""
        return start

    def of_chunks(self, loads: Loads) -> np.ndarray:
        """Return the tokens before every chunk's slice, [C]."""
        return loads.earlier_tokens


@dataclass(frozen=True, slots=True)
class DiagonalPairs(Column):
    """Query-key pairs within a span; an uncut document has no other pairs.

    The causal mask hides half of a span's block of attention scores. In cuDNN 9.19 on an H100, the
    backward of such a pair takes about twice as long as that of a pair with a key before the span
    (with the mask ``padding_causal_bottom_right``).
    """

    NAME = "diagonal_pairs"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the pairs inside every span."""
        return (stop - start) * (stop - start + 1) / 2


@dataclass(frozen=True, slots=True)
class ContextDiagonalPairs(DiagonalPairs):
    """Query-key pairs within a span that does not begin at token 0 of its document.

    :class:`DiagonalPairs` counts these pairs, too. They have a column of their own, because the
    attention mask of a span without context may make the pairs within it faster.
    """

    NAME = "context_diagonal_pairs"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the pairs inside every span after a context; 0 for other spans."""
        return np.where(start > 0, DiagonalPairs.of_spans(self, start, stop), 0.0)


CONTEXT = ContextTokens()
DIAGONALS: tuple[Column, ...] = (DiagonalPairs(), ContextDiagonalPairs())


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a layout: tokens (index TOKENS), pairs (PAIRS) and 1 (CHUNKS), then ``extra``.

    Attributes:
        windows: columns of sliding windows, narrowest first.
        extra: all additional columns: the windows, then other columns sorted by name.
    """

    windows: tuple[WindowPairs, ...]
    extra: tuple[Column, ...]

    @classmethod
    def of(cls, extra: Set[Column]) -> Self:
        """Return the columns with the additional columns ``extra``."""
        windows = tuple(
            sorted(
                (column for column in extra if isinstance(column, WindowPairs)),
                key=lambda column: column.size,
            )
        )
        return cls(windows, (*windows, *sorted(extra - {*windows}, key=str)))

    @property
    def width(self) -> int:
        """Number of columns."""
        return 3 + len(self.extra)

    def index(self, of: Column) -> int:
        """Return the index of an additional column among all columns."""
        return 3 + self.extra.index(of)

    def features(self, loads: Loads) -> np.ndarray:
        """Return the values of all columns, [columns, chunks]."""
        if self.extra not in loads.features:
            rows = [loads.tokens, loads.pairs, np.ones(loads.chunks)]
            rows += [column.of_chunks(loads) for column in self.extra]
            loads.features[self.extra] = np.stack(rows)
            loads.features[self.extra].flags.writeable = False
        return loads.features[self.extra]

    def batch_features(
        self, lengths: np.ndarray, chunks: float, starts: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the sums of all columns over uncut documents in ``chunks`` chunks: [columns].

        ``lengths`` contains the number of tokens of each document, ``starts`` the position of its
        first token; default: 0.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        begins = np.zeros_like(lengths) if starts is None else np.asarray(starts, np.float64)
        ends = begins + lengths
        sums = [lengths.sum(), (lengths * (lengths + 1) / 2 + begins * lengths).sum(), chunks]
        return np.array([*sums, *(c.of_spans(begins, ends).sum() for c in self.extra)])
