"""Rows of a sliced document that a sliding-window layer caches: the tails of slices.

A query sees itself and the W tokens before it. Later slices therefore need only the last W rows of
a slice. The buffer holds these rows for every slice but the document's last slice, in order:

    document    [. . . . . # #|. . # #|#|. . . .]      W = 2, boundaries after slices of 7, 4, 1
    buffer                [# #|# #|#]                   a slice after a boundary sees the W rows
                           0   2   4 5                  that end there

If boundaries are unknown, as in calibration, all rows are cached, and the buffer's row numbers are
token positions.

Shape suffixes: T rows of a chunk, t rows of a slice, P context rows that the slice sees, G key
heads, D head size.
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
    """Cached rows of a document with slice ``boundaries``, for a window of ``before`` tokens.

    ``boundaries`` are the ends of all slices but the last; if they are None, all rows are cached.
    """

    before: int
    boundaries: tuple[int, ...] | None

    @property
    def capacity(self) -> int | None:
        """Number of rows of the buffer; None for one row per token of the document's context."""
        return None if self.boundaries is None else sum(self._sizes(self.boundaries))

    def kept(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first buffer row and the number of rows that slice [start, stop) caches."""
        if self.boundaries is None:
            return start, stop - start
        places = list(accumulate(self._sizes(self.boundaries), initial=0))
        return places[self.boundaries.index(stop)], min(self.before, stop - start)

    def seen(self, start: int, most: int | None = None) -> tuple[int, int]:
        """Return the range [first, stop) of buffer rows that a slice beginning at ``start`` sees.

        ``start`` is the position of the slice's first token. ``most`` is the maximum number of
        rows; None for the full window.
        """
        most = self.before if most is None else most
        if self.boundaries is None:
            return max(0, start - most), start
        sizes = self._sizes(self.boundaries)
        end = sum(sizes[: self.boundaries.index(start) + 1])
        return end - min(most, start), end

    def _sizes(self, boundaries: Sequence[int]) -> list[int]:
        return [min(self.before, stop - start) for start, stop in pairwise((0, *boundaries))]


def keys_and_values(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the keys and the values of ``parts``; a single part is not copied."""
    keys, values = zip(*parts, strict=True)
    return concatenated(keys), concatenated(values)


@dataclass(frozen=True, slots=True)
class SliceTails:
    """Tails (last rows of slices) that a slice reads and writes in a sliding-window layer.

    Args:
        store: the K/V cache.
        layer: number of the layer in the stage.
        rows: rows of the slice.
        before: number of earlier tokens that a query sees (window).
    """

    store: Store
    layer: int
    rows: Rows
    before: int

    def _tails_of(self, document: int) -> Tails:
        return Tails(self.before, self.store.boundaries.get(document))

    @property
    def _seen(self) -> list[tuple[int, int, int]]:
        """Buffer ranges (document, start, end) of the context that the slice sees, by position."""
        parts, left = [], self.before
        for document, inputs in reversed(self.rows.context):
            if left > 0:
                parts.append((document, *self._tails_of(document).seen(inputs, left)))
                left -= inputs
        return parts[::-1]

    def keep(self, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Cache the last rows of the slice's K and V, unless it is the document's last slice."""
        span = self.rows.span
        if self.rows.last:
            return
        tails = self._tails_of(span.document)
        place, count = tails.kept(span.start, span.stop)
        tail = slice(self.rows.stop - count, self.rows.stop)
        kept = k_TGD[tail], v_TGD[tail]
        self.store.append(self.layer, span.document, place, *kept, tails.capacity)

    def context(self) -> tuple[Tensor, Tensor] | None:
        """Return the cached k and v [P, G, D] of the rows before the slice.

        The result is None if the slice begins at the first position. If the rows belong to one
        document, k and v are views of the cache.
        """
        parts = [self.store.context(self.layer, d, end, first) for d, first, end in self._seen]
        return keys_and_values(parts) if parts else None

    def hand_over(
        self, own_tGD: tuple[Tensor, Tensor], front_PGD: tuple[Tensor, Tensor] | None
    ) -> None:
        """Exchange gradients of k and v with the K/V store, in the backward of the slice.

        The gradients that later slices stored for this slice's tail are added to ``own_tGD`` in
        place. After the backward of a document's first slice, the cached tails are freed.

        Args:
            own_tGD: [rows, groups, head size] gradients of the slice's k and v.
            front_PGD: [context rows, groups, head size] gradients of the context's k and v, which
                are stored for earlier slices; None without context.
        """
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
