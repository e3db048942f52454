"""Rows of a cut document that a layer with a window keeps for later slices: tails, not all of it.

A query sees itself and the W inputs before it. So of each slice but the last only its last W rows
are wanted later, and of the documents' rows those of every border lie one behind the other:

    document    [. . . . . # #|. . # #|#|. . . .]      W = 2, borders behind slices of 7, 4, 1
    buffer                [# #|. # #|#]                 what the slice behind a border sees is the
                           0   2     4 5                W rows that end there

Where borders are not known, as in calibration, everything is kept and places are inputs.

T rows of a chunk, t of a slice, P rows of its context that it sees, G key heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from megatron_epp.layers.chunk_state import Rows
from megatron_epp.runtime.kv_store import Store


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


@dataclass(frozen=True, slots=True)
class SliceTails:
    """Tails that a slice meets in a layer with a window: those of its context that it sees, and the
    one that it leaves to later slices.
    """

    store: Store
    layer: int
    rows: Rows
    before: int

    @property
    def _tails(self) -> Tails:
        return Tails(self.before, self.store.borders.get(self.rows.span.document))

    def keep(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Leave the end of the slice's rows of the chunk's k and v to later ones, if there are."""
        span, tails = self.rows.span, self._tails
        if self.rows.last:
            return
        place, count = tails.kept(span.start, span.stop)
        tail = slice(self.rows.stop - count, self.rows.stop)
        kept = k_TGD[tail], v_TGD[tail]
        self.store.append(self.layer, span.document, place, *kept, tails.capacity)

    def context(self) -> tuple[Tensor, Tensor] | None:
        """Views of k and v [P, G, D] in front of the slice; None: it is the document's first."""
        span = self.rows.span
        if span.start == 0:
            return None
        first, end = self._tails.seen(span.start)
        return self.store.context(self.layer, span.document, end, first)

    def hand_over(
        self, own_tGD: tuple[Tensor, Tensor], front_PGD: tuple[Tensor, Tensor] | None
    ) -> None:
        """Add to the gradients of the slice's ``own`` k and v what later slices left for its tail,
        rounded once, and leave those of the context, if there is one, to the slices before; else
        the layer's tails are freed."""
        span, tails = self.rows.span, self._tails
        if not self.rows.last:
            place, count = tails.kept(span.start, span.stop)
            later = self.store.gradient(self.layer, span.document, place, place + count)
            for gradient_tGD, of_later in zip(own_tGD, later, strict=True):
                gradient_tGD[-count:] += of_later
        if front_PGD is None:
            self.store.release(self.layer, span.document)
            return
        first, _ = tails.seen(span.start)
        self.store.add_window_gradient(self.layer, span.document, first, *front_PGD)
