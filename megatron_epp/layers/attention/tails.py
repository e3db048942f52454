"""Rows of a cut document that a layer with a window keeps for later slices: tails, not all of it.

A query sees itself and the W inputs before it. So of each slice but the last only its last W rows
are wanted later, and of the documents' rows those of every border lie one behind the other:

    document    [. . . . . # #|. . # #|#|. . . .]      W = 2, borders behind slices of 7, 4, 1
    buffer                [# #|. # #|#]                 what the slice behind a border sees is the
                           0   2     4 5                W rows that end there

Where borders are not known, as in calibration, everything is kept and places are inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Tails:
    """Rows kept of a document cut at ``borders`` (where its slices but the last end), for a window
    of ``before`` inputs in front of each."""

    before: int
    borders: tuple[int, ...] | None

    @property
    def capacity(self) -> int | None:
        """Rows of the buffer; None: as many as the document's context."""
        return None if self.borders is None else sum(self._sizes(self.borders))

    def kept(self, start: int, stop: int) -> tuple[int, int]:
        """(place in the buffer, rows) of what slice [start, stop) leaves: its last rows."""
        if self.borders is None:
            return start, stop - start
        places = list(accumulate(self._sizes(self.borders), initial=0))
        return places[self.borders.index(stop)], min(self.before, stop - start)

    def seen(self, start: int) -> tuple[int, int]:
        """[from, to) in the buffer of what the slice from ``start`` on sees of earlier ones."""
        if self.borders is None:
            return max(0, start - self.before), start
        sizes = self._sizes(self.borders)
        end = sum(sizes[: self.borders.index(start) + 1])
        return end - min(self.before, start), end

    def _sizes(self, borders: Sequence[int]) -> list[int]:
        return [min(self.before, stop - start) for start, stop in pairwise((0, *borders))]
