"""Columns: the numbers of a chunk that seconds are linear in.

Every layer has the first three: tokens, query-key pairs and 1. A kind of layer adds its own as
subclasses of :class:`Column`, which its :attr:`Part.COLUMNS <megatron_epp.cost.kinds.base.Part>`
name; a profile then has seconds for each unit of them (``LayerCoefficients.column_seconds``).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron_epp.cost.loads import Loads, pairs_before
from megatron_epp.ir import Span

TOKENS, PAIRS, CHUNKS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Column(ABC):
    """A number of every span of a document, added up over the spans of a chunk.

    NAME     its name in profile files, before its size
    FITTED   whether measurements tell its coefficient apart from those of tokens and pairs
    size     0 where the column needs none
    """

    NAME: ClassVar[str]
    FITTED: ClassVar[bool] = True
    size: int = 0

    def __str__(self) -> str:
        """Return the column's name in profile files."""
        return f"{self.NAME} {self.size}" if self.size else self.NAME

    @abstractmethod
    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the numbers of spans from ``start`` to ``stop`` of their documents."""

    def of(self, spans: Iterable[Span]) -> float:
        """Return the number of a chunk that has these ``spans``."""
        start, stop = np.array([(span.start, span.stop) for span in spans]).reshape(-1, 2).T
        return float(self.of_spans(start, stop).sum())

    def of_chunks(self, loads: Loads) -> np.ndarray:
        """Return the numbers of the chunks, [C]."""
        return loads.over_chunks(self.of_spans(*loads.spans[1:]))


@dataclass(frozen=True, slots=True)
class WindowPairs(Column):
    """Query-key pairs where a query sees at most ``size`` keys, itself among them.

    Where they are measured, the seconds of all pairs contain theirs.
    """

    NAME, FITTED = "window_pairs", False

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the pairs of every span."""
        return pairs_before(stop, self.size) - pairs_before(start, self.size)


@dataclass(frozen=True, slots=True)
class ContextTokens(Column):
    """Tokens of a slice's document before the slice."""

    NAME = "context_tokens"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the tokens before every span."""
        return start

    def of_chunks(self, loads: Loads) -> np.ndarray:
        """Return the tokens before every chunk's slice, [C]."""
        return loads.earlier_tokens


@dataclass(frozen=True, slots=True)
class DiagonalPairs(Column):
    """Query-key pairs inside a span itself: of a document that is not cut, all of its pairs.

    Half of the block of scores that they lie in is masked. Of cuDNN's kernels (9.19, on an H100)
    the backward takes about twice as long for such a pair as for one of a slice and its context.
    """

    NAME = "diagonal_pairs"

    def of_spans(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the pairs inside every span."""
        return (stop - start) * (stop - start + 1) / 2


CONTEXT, DIAGONAL = ContextTokens(), DiagonalPairs()
