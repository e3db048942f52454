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
from megatron_epp.layers.concatenated import concatenated
from megatron_epp.runtime.kv_store import Store


@dataclass(frozen=True, slots=True)
class Tails:
    """Rows kept of a document cut at ``boundaries`` (where its slices but the last end), for a
    window of ``before`` inputs in front of each."""

    before: int
    boundaries: tuple[int, ...] | None

    @property
    def capacity(self) -> int | None:
        """Rows of the buffer; None: as many as the document's context."""
        return None if self.boundaries is None else sum(self._sizes(self.boundaries))

    def kept(self, start: int, stop: int) -> tuple[int, int]:
        """(place in the buffer, rows) of what slice [start, stop) leaves: its last rows."""
        if self.boundaries is None:
            return start, stop - start
        places = list(accumulate(self._sizes(self.boundaries), initial=0))
        return places[self.boundaries.index(stop)], min(self.before, stop - start)

    def seen(self, start: int, most: int | None = None) -> tuple[int, int]:
        """[from, to) in the buffer of what the slice from ``start`` on sees of earlier ones: at
        ``most`` so many rows, default all within the window."""
        most = self.before if most is None else most
        if self.boundaries is None:
            return max(0, start - most), start
        sizes = self._sizes(self.boundaries)
        end = sum(sizes[: self.boundaries.index(start) + 1])
        return end - min(most, start), end

    def _sizes(self, boundaries: Sequence[int]) -> list[int]:
        return [min(self.before, stop - start) for start, stop in pairwise((0, *boundaries))]


def keys_and_values(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(k, v) of ``parts``, one behind the other: a copy where they are several."""
    keys, values = zip(*parts, strict=True)
    return concatenated(keys), concatenated(values)


@dataclass(frozen=True, slots=True)
class SliceTails:
    """Tails that a slice meets in a layer with a window: those of its context that it sees, and the
    one that it leaves to later slices.
    """

    store: Store
    layer: int
    rows: Rows
    before: int

    def _tails_of(self, document: int) -> Tails:
        return Tails(self.before, self.store.boundaries.get(document))

    @property
    def _seen(self) -> list[tuple[int, int, int]]:
        """(document, from, to) in the buffers of what the slice sees of other spans, in the order
        of their positions."""
        parts, left = [], self.before
        for document, inputs in reversed(self.rows.context):
            if left > 0:
                parts.append((document, *self._tails_of(document).seen(inputs, left)))
                left -= inputs
        return parts[::-1]

    def keep(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Leave the end of the slice's rows of the chunk's k and v to later ones, if there are."""
        span = self.rows.span
        if self.rows.last:
            return
        tails = self._tails_of(span.document)
        place, count = tails.kept(span.start, span.stop)
        tail = slice(self.rows.stop - count, self.rows.stop)
        kept = k_TGD[tail], v_TGD[tail]
        self.store.append(self.layer, span.document, place, *kept, tails.capacity)

    def context(self) -> tuple[Tensor, Tensor] | None:
        """k and v [P, G, D] in front of the slice, views where they are of one document; None: it
        begins at the first position."""
        parts = [self.store.context(self.layer, d, end, first) for d, first, end in self._seen]
        return keys_and_values(parts) if parts else None

    def hand_over(
        self, own_tGD: tuple[Tensor, Tensor], front_PGD: tuple[Tensor, Tensor] | None
    ) -> None:
        """Add to the gradients of the slice's ``own`` k and v what later slices left for its tail,
        rounded once, and leave those of the context, if there is one, to the slices before. Behind
        a document's first slice the layer's tails are freed."""
        span = self.rows.span
        if self.rows.cut and not self.rows.last:
            place, count = self._tails_of(span.document).kept(span.start, span.stop)
            later = self.store.gradient(self.layer, span.document, place, place + count)
            for gradient_tGD, of_later in zip(own_tGD, later, strict=True):
                gradient_tGD[-count:] += of_later
        if front_PGD is not None:
            begin = 0
            for document, first, end in self._seen:
                part = slice(begin, begin + end - first)
                gradients = (gradient_PGD[part] for gradient_PGD in front_PGD)
                self.store.add_window_gradient(self.layer, document, first, *gradients)
                begin = part.stop
        if self.rows.cut and span.start == 0:
            self.store.release(self.layer, span.document)
