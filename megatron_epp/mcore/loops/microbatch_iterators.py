"""The micro-batches of one call: drawn once each, and handed out one at a time in any order.

A loop's iterator gives micro-batch after micro-batch, and its forward step draws the next one. Here
forward steps run in a planned order, so each is given an iterator of its own that holds the one
micro-batch it is to draw. On a rank whose forward step never draws, nothing is drawn.
"""

import copy
from typing import Any


def draws_by_offset(source: Any) -> bool:
    """Whether ``source`` is read by ``get_next(keys)`` at an ``offset``, as slime's iterators."""
    return hasattr(source, "get_next") and hasattr(source, "offset")


class MicroBatches:
    """``count`` micro-batches of the iterator ``source``, or of nothing on ranks that have none.

    repeatable   they may be drawn again: a shallow copy of what is handed out stays here, as
                 forward steps take entries out of it
    """

    def __init__(self, source: Any, count: int):
        self.source, self.count, self.repeatable = source, count, False
        self._drawn: list[Any] = []
        self._start = source.offset if draws_by_offset(source) else 0

    @property
    def readable(self) -> bool:
        """Whether this rank has an iterator."""
        return hasattr(self.source, "__next__") or draws_by_offset(self.source)

    @property
    def drawn(self) -> bool:
        """Whether the source was drawn from: somebody else needs ``from_the_start``."""
        return bool(self._drawn)

    def item(self, number: int) -> Any:
        """Micro-batch ``number``, which stays here until it is let go. Of a source with an offset:
        a reader of it.

        ValueError: the source ends before.
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
        if number < len(self._drawn):
            self._drawn[number] = copy.copy(self._drawn[number]) if self.repeatable else None

    def only(self, number: int) -> "SingleMicrobatch":
        """The iterator that the forward step of micro-batch ``number`` draws from."""
        if draws_by_offset(self.source):
            return _SingleRead(self, number)
        return SingleMicrobatch(self, number)

    def from_the_start(self) -> Any:
        """The source as it was, for somebody else: what was drawn comes once more."""
        return _Again(self) if self._drawn else self.source

    def finish(self) -> None:
        """Leave a source with an offset behind the last micro-batch, as forward steps would."""
        if draws_by_offset(self.source):
            self.source.offset = self._place(self.count)

    def _place(self, number: int) -> int:
        if getattr(self.source, "micro_batch_indices", None) is not None:
            return self._start + number
        return self._start + number * int(getattr(self.source, "micro_batch_size", None) or 1)


class SingleMicrobatch:
    """An iterator over one micro-batch, which says so when it is drawn from twice."""

    def __init__(self, batches: MicroBatches, number: int):
        self._batches, self._number, self._handed_out = batches, number, False

    def __iter__(self) -> "SingleMicrobatch":
        return self

    def __next__(self) -> Any:
        self._once()
        item = self._batches.item(self._number)
        self._batches.let_go(self._number)
        return item

    def _once(self) -> None:
        if self._handed_out:
            raise ValueError(
                f"the forward step drew twice for micro-batch {self._number}: expected one draw "
                "from the data iterator for each of num_microbatches (draw once and keep it)"
            )
        self._handed_out = True


class _SingleRead(SingleMicrobatch):
    """The same of a source with an offset; everything else of the source can be asked for."""

    def get_next(self, *keys: Any, **named: Any) -> Any:
        self._once()
        return self._batches.item(self._number).get_next(*keys, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches.source, name)


class _Reader:
    """Reads a source with an offset at one place, as often as it likes."""

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


class _Again:
    """An iterator over the items already drawn from a source, then over the rest of it."""

    def __init__(self, batches: MicroBatches):
        self._batches, self._next = batches, 0

    def __iter__(self) -> "_Again":
        return self

    def __next__(self) -> Any:
        number, self._next = self._next, self._next + 1
        return self._batches.item(number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches.source, name)


class SingleValue:
    """An iterator over one value that is at hand."""

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
