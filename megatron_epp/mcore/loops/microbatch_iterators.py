"""Micro-batches of one call, which are drawn once and passed to forward steps in any order.

A loop's forward step draws the next micro-batch from an iterator. Because forward steps run in a
planned order, each forward step receives an iterator over only its own micro-batch. On ranks whose
forward steps draw nothing, no micro-batch is drawn.
"""

import copy
from typing import Any


def draws_by_offset(source: Any) -> bool:
    """Return whether ``source`` has ``get_next`` and ``offset``, as slime's iterators have."""
    return hasattr(source, "get_next") and hasattr(source, "offset")


class MicroBatches:
    """Micro-batches of one call, drawn from the loop's data iterator in any order.

    Attributes:
        source: The loop's data iterator; None on ranks without one.
        count: Number of micro-batches of the call.
        repeatable: Whether micro-batches may be drawn again. If so, :meth:`let_go` caches a shallow
            copy of the micro-batch, because forward steps may remove entries from the original.
    """

    def __init__(self, source: Any, count: int):
        self.source, self.count, self.repeatable = source, count, False
        self._drawn: list[Any] = []
        self._start = source.offset if draws_by_offset(source) else 0

    @property
    def readable(self) -> bool:
        """Whether this rank has a data iterator."""
        return hasattr(self.source, "__next__") or draws_by_offset(self.source)

    @property
    def drawn(self) -> bool:
        """Whether ``next`` has drawn micro-batches; :meth:`from_the_start` yields them again."""
        return bool(self._drawn)

    def item(self, number: int) -> Any:
        """Return micro-batch ``number``, which stays cached until :meth:`let_go`.

        All micro-batches up to ``number`` are drawn from the source and cached. For a source with
        an offset, nothing is drawn. The result then reads the source at the micro-batch's offset.

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
        """Drop micro-batch ``number`` from the cache; if repeatable, keep a shallow copy."""
        if number < len(self._drawn):
            self._drawn[number] = copy.copy(self._drawn[number]) if self.repeatable else None

    def only(self, number: int) -> "SingleMicrobatch":
        """Return an iterator over micro-batch ``number`` alone, for its forward step."""
        if draws_by_offset(self.source):
            return _SingleRead(self, number)
        return SingleMicrobatch(self, number)

    def from_the_start(self) -> Any:
        """Return an iterator over all micro-batches of the source, including drawn ones."""
        return _Again(self) if self._drawn else self.source

    def finish(self) -> None:
        """Advance ``source.offset`` past the call's micro-batches, as Megatron's schedule would.

        A source without an offset does not change.
        """
        if draws_by_offset(self.source):
            self.source.offset = self._place(self.count)

    def _place(self, number: int) -> int:
        if getattr(self.source, "micro_batch_indices", None) is not None:
            return self._start + number
        return self._start + number * int(getattr(self.source, "micro_batch_size", None) or 1)


class SingleMicrobatch:
    """Iterator over one micro-batch; a second ``next`` raises a ValueError.

    ``next`` drops the micro-batch from the cache of :class:`MicroBatches`.
    """

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
    """Single micro-batch of a source with an offset; has the attributes of the source, too."""

    def get_next(self, *keys: Any, **named: Any) -> Any:
        self._once()
        return self._batches.item(self._number).get_next(*keys, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches.source, name)


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


class _Again:
    """Iterator over the items already drawn from a source, then over its remaining items."""

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
