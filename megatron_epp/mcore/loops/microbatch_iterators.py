"""Micro-batches of one call, which are drawn once and read in any order.

A loop's forward step draws the next micro-batch from an iterator. Here it draws the rows of one
chunk, from an iterator that yields nothing else. On ranks without an iterator, nothing is drawn.
"""

from typing import Any


def draws_by_offset(source: Any) -> bool:
    """Return whether ``source`` has ``get_next`` and ``offset``, as slime's iterators have."""
    return hasattr(source, "get_next") and hasattr(source, "offset")


class MicroBatches:
    """Micro-batches of one call, drawn from the loop's data iterator in any order.

    Attributes:
        source: The loop's data iterator; None on ranks without one.
        count: Number of micro-batches of the call.
    """

    def __init__(self, source: Any, count: int):
        self.source, self.count = source, count
        self._drawn: list[Any] = []
        self._start = source.offset if draws_by_offset(source) else 0

    @property
    def readable(self) -> bool:
        """Whether this rank has a data iterator."""
        return hasattr(self.source, "__next__") or draws_by_offset(self.source)

    def item(self, number: int) -> Any:
        """Return micro-batch ``number``, which stays cached until :meth:`let_go`.

        All micro-batches up to ``number`` are drawn from the source and cached. If the source has
        an attribute ``offset``, nothing is drawn: the result reads the source at the offset of the
        micro-batch.

        Raises:
            ValueError: The source ends before this micro-batch.
        """
        if draws_by_offset(self.source):
            return _Reader(self.source, self._place(number))
        while len(self._drawn) <= number:
            try:
                self._drawn.append(next(self.source))
            except StopIteration:
                raise ValueError(
                    f"the data iterator ended after {len(self._drawn)} of the {self.count} "
                    "micro-batches that num_microbatches promises"
                ) from None
        return self._drawn[number]

    def let_go(self, number: int) -> None:
        """Drop micro-batch ``number`` from the cache."""
        if number < len(self._drawn):
            self._drawn[number] = None

    def finish(self) -> None:
        """Advance ``source.offset`` past the call's micro-batches, as Megatron's schedule would.

        A source without an attribute ``offset`` does not change.
        """
        if draws_by_offset(self.source):
            self.source.offset = self._place(self.count)

    def _place(self, number: int) -> int:
        if getattr(self.source, "micro_batch_indices", None) is not None:
            return self._start + number
        return self._start + number * int(getattr(self.source, "micro_batch_size", None) or 1)


class _Reader:
    """Source fixed to one offset; every call of ``get_next`` reads the same micro-batch."""

    def __init__(self, source: Any, place: int):
        self._source, self._place = source, place

    def get_next(self, *keys: Any, **named: Any) -> Any:
        before, self._source.offset = self._source.offset, self._place
        try:
            return self._source.get_next(*keys, **named)
        finally:
            self._source.offset = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class SingleValue:
    """Iterator over one value; a second ``next`` raises a ValueError."""

    def __init__(self, value: Any):
        self._value, self._handed_out = value, False

    def __iter__(self) -> "SingleValue":
        return self

    def __next__(self) -> Any:
        if self._handed_out:
            raise ValueError(
                "the forward step drew twice for one chunk: expected one draw from the data "
                "iterator in each call (draw once and keep it)"
            )
        self._handed_out = True
        return self._value
