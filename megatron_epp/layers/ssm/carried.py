"""States carried over slice boundaries: kernel calls of a chunk, with initial and final states.

    rows of a chunk     [slice of 0 . . .|doc 1 .|doc 2|padding]
    calls               [+ + slice of 0 . . .|doc 1 .|doc 2|padding]     one call: slice is first
                         + +  rows before the boundary, for the convolution

A kernel call may compute several sequences, but has one initial state, for its first sequence, and
one final state, of its last sequence. A slice that follows another slice therefore begins a call,
and a slice that precedes another slice ends a call. For every slice boundary, the K/V store has the
state and the W - 1 rows before the boundary, for a convolution of W taps. Their gradients go
through the store from the later slice to the earlier slice.

A document that continues another document begins with the state at a slice boundary of the other
document. The state comes from the store or, if the boundary is in the same chunk, directly from
the call that produced it. A call with too many elements for a kernel is split into several calls,
whose states are passed through autograd.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState, Rows

# Kernels index the elements of a tensor with 32 bits. Head sizes, blocks and strides multiply what
# is addressed, so calls stay well below.
MOST_ELEMENTS = 2**30
BLOCK_ROWS = 128  # rows of a kernel's own blocks, at most
# Attribute of a tensor of boundaries: the lengths of its sequences, which kernel wrappers read on
# the host without a device synchronisation.
HOST_LENGTHS = "epp_lengths"
WITHIN = -1  # the boundary between two calls of one slice


@dataclass(frozen=True, slots=True)
class Call:
    """Rows [start, stop) of a chunk for one kernel call: sequences with the given ``lengths``.

    Attributes:
        start: first row.
        stop: row after the last row.
        lengths: number of rows of each sequence.
        document: document of the last sequence, if this document is sliced; else -1.
        before: index of the slice boundary of document ``of`` at which the first sequence begins;
            None if a document begins there, ``WITHIN`` if the span begins in an earlier call.
        after: index of the slice boundary of ``document`` at which the last sequence ends; None if
            no slice follows there, ``WITHIN`` if the span continues in a later call.
        of: document of the boundary ``before``; -1 if there is none.
    """

    start: int
    stop: int
    lengths: tuple[int, ...]
    document: int
    before: int | None = None
    after: int | None = None
    of: int = -1


def calls_of(state: ChunkState, channels: int, alone: bool = False) -> tuple[Call, ...]:
    """Return the kernel calls for all rows of a chunk with ``channels`` channels; cached.

    ``alone`` makes every sequence a call, for kernels that support one sequence per call.
    """
    most = most_rows(channels)
    calls = _pieces if alone else _calls
    name = f"calls of {most} rows{', alone' * alone}"
    return state.once(name, lambda: tuple(calls(state, most)))


def most_rows(channels: int) -> int:
    """Return the largest number of rows of ``channels`` channels in one call."""
    return max(1, MOST_ELEMENTS // channels // BLOCK_ROWS) * BLOCK_ROWS


def _calls(state: ChunkState, most: int) -> Iterator[Call]:
    call: Call | None = None
    for row in _pieces(state, most):
        joins = (
            call is not None
            and call.after is None
            and row.before is None
            and row.stop - call.start <= most
        )
        if call is not None and joins:
            lengths = *call.lengths, *row.lengths
            document = call.document if row.document < 0 else row.document
            call = replace(call, stop=row.stop, lengths=lengths, document=document, after=row.after)
            continue
        if call is not None:
            yield call
        call = row
    assert call is not None, "a chunk has rows, if of padding alone"
    yield call


def _pieces(state: ChunkState, most: int) -> Iterator[Call]:
    """Yield calls for each span and for the padding, with at most ``most`` rows each."""
    for rows in state.rows:
        before, after = _boundaries(state, rows)
        for start in range(rows.start, rows.stop, most):
            stop = min(start + most, rows.stop)
            begins = before if start == rows.start else WITHIN
            ends = after if stop == rows.stop else WITHIN
            document = rows.span.document if rows.cut else -1
            of = rows.context[-1][0] if rows.context else -1
            yield Call(start, stop, (stop - start,), document, begins, ends, of)
    if state.tokens > state.used:
        yield Call(state.used, state.tokens, (state.tokens - state.used,), -1)


def _boundaries(state: ChunkState, rows: Rows) -> tuple[int | None, int | None]:
    """Return the indices of the slice boundaries at which the span of ``rows`` begins and ends.

    An index is None if no slice precedes or follows the span. The first boundary may be a boundary
    of another document, which the span's document continues.
    """
    if not (rows.cut or rows.prefix):
        return None, None
    start, stop = rows.span.start, rows.span.stop
    boundaries = state.store.boundaries.get(rows.span.document)
    if boundaries is None:  # in calibration, with a single slice
        boundaries = (start, stop) if start else (stop,)
    before = boundaries.index(start) if start else None
    if rows.prefix and not start:
        document, inputs = rows.context[-1]
        before = state.store.boundaries[document].index(inputs)
    return before, boundaries.index(stop) if rows.cut and not rows.last else None


class CarriedStates:
    """States and convolution rows at slice boundaries, in one pass of a chunk through a layer.

    For each kernel call, in order, the layer gets the rows before the call from :meth:`front`, and
    passes the call's rows to :meth:`after`, which saves the last rows for the next call. Then the
    layer gets the initial state from :meth:`initial`, runs the kernel, and passes the outputs and
    the final state to :meth:`leave`.

    Args:
        state: state of the chunk.
        layer: number of the layer in the stage.
        taps: W, the taps of the layer's convolution.
        channels: number of channels of a row, which limits the rows of a call.
        alone: whether each sequence is a call of its own.
    """

    def __init__(
        self, state: ChunkState, layer: int, taps: int, channels: int, alone: bool = False
    ):
        self.state, self.layer, self.taps, self.alone = state, layer, taps, alone
        self.calls, self.most = calls_of(state, channels, alone), most_rows(channels)
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}
        # Call that produces the state of a document's boundary, for those in this chunk.
        self._leaves = {
            (call.document, call.after): number
            for number, call in enumerate(self.calls)
            if call.after not in (None, WITHIN)
        }
        self._finals: dict[int, Tensor] = {}
        self._tails: dict[int, Tensor] = {}
        self._within: Tensor | None = None

    def of_calls(self, rows: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Split the chunk's ``rows`` along dimension ``dim`` into the rows of each call."""
        return rows.split([call.stop - call.start for call in self.calls], dim)

    def front(self, number: int, rows_LC: Tensor) -> Tensor | None:
        """Return the W - 1 rows [W-1, C] before call ``number``, for a convolution of W taps.

        The result is None at the start of a document. If the rows before the call are in another
        chunk, these rows and the state are read from the store. ``rows_LC`` are the call's rows.
        """
        call = self.calls[number]
        if call.before is None:
            return None
        if call.before == WITHIN:
            return self._tails[number - 1]
        if (here := self._leaves.get((call.of, call.before))) is not None:
            return self._tails[here]
        self._taken[number] = _Take.apply(rows_LC, self.state, self.layer, call)
        return self._taken[number][1]

    def initial(self, number: int) -> Tensor | None:
        """Return the initial state of call ``number``; None for zeros.

        Call :meth:`front` first. The state has the shape that the layer's kernel returns.
        """
        call = self.calls[number]
        if call.before is None:
            return None
        if call.before == WITHIN:
            assert self._within is not None, "calls come in order"
            return self._within
        here = self._leaves.get((call.of, call.before))
        if here is not None:
            _seen(self.state, self.layer, call)
            return self._finals[here]
        return self._taken.pop(number)[0]

    def after(self, number: int, rows_LC: Tensor) -> None:
        """Save the last W - 1 rows of call ``number``, for the convolution of the next call.

        ``rows_LC`` [rows, channels] are the input rows of the convolution, which include those of
        :meth:`front`. If no slice follows the call, nothing is saved.
        """
        call, wanted = self.calls[number], self.taps - 1
        if call.after is None:
            return
        if len(call.lengths) > 1:  # the slice after unsliced documents sees nothing of them
            rows_LC = rows_LC[len(rows_LC) - call.lengths[-1] :]
        if len(rows_LC) < wanted:  # at the start of its document
            nothing = rows_LC.new_zeros(wanted - len(rows_LC), rows_LC.shape[1])
            rows_LC = torch.cat((nothing, rows_LC))
        self._tails[number] = rows_LC[len(rows_LC) - wanted :]

    def leave(self, number: int, outputs: Tensor, final: Tensor | None) -> Tensor:
        """Return ``outputs`` of call ``number``, and save its final state for the next call.

        If the call ends at a slice boundary, the state goes to the store, and the backward of the
        outputs reads the state's gradient from the store. If the next call continues the same
        slice, :meth:`initial` returns the state.

        Args:
            number: index of the call.
            outputs: outputs of the call.
            final: state after the last row; None if :meth:`wants_final` is false.
        """
        call = self.calls[number]
        if call.after is None:
            return outputs
        assert final is not None, "a call in front of a border gives its state"
        if call.after == WITHIN:
            self._within = final
            return outputs
        self._finals[number] = final
        return _Leave.apply(outputs, final, self._tails[number], self.state, self.layer, call)

    def wants_final(self, number: int) -> bool:
        """Return whether call ``number`` must return its final state."""
        return self.calls[number].after is not None

    def boundaries(self, number: int, front: int, device: torch.device) -> Tensor | None:
        """Return the cumulative lengths of the sequences of call ``number``: [sequences + 1] int64.

        The first sequence includes the ``front`` rows before the call. The tensor is cached for all
        layers of the chunk. The result is None if every sequence is a call (``alone``).
        """
        if self.alone:
            return None

        lengths = self.lengths(number, front)
        boundaries = self._once(
            "borders", number, front, device, lambda: torch.tensor([0, *accumulate(lengths)])
        )
        setattr(boundaries, HOST_LENGTHS, lengths)
        return boundaries

    def sequences(self, number: int, front: int, device: torch.device) -> Tensor | None:
        """Return the sequence index of each of the L rows of call ``number``: int32 [1, L].

        The first sequence includes the ``front`` rows before the call. The result is None if there
        is only one sequence.
        """
        if len(self.calls[number].lengths) == 1:
            return None

        def make() -> Tensor:
            lengths = torch.tensor(self.lengths(number, front))
            return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]

        return self._once("sequences", number, front, device, make)

    def lengths(self, number: int, front: int) -> tuple[int, ...]:
        """Return the lengths of call ``number``'s sequences, with ``front`` rows in the first."""
        first, *others = self.calls[number].lengths
        return first + front, *others

    def _once(
        self, what: str, number: int, front: int, device: torch.device, make: Callable[[], Tensor]
    ) -> Tensor:
        """Return ``make()`` on the device, cached per chunk, ``what``, ``number`` and ``front``."""
        name = f"{what} of call {number} of {self.most} rows, after {front}"
        return self.state.once(name, lambda: on_device(make(), device))


class _Take(torch.autograd.Function):
    """Function that reads the state and the rows at a call's first boundary from the store.

    Its backward adds their gradients to the store. ``rows`` of the call only connect the function
    to the autograd graph.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, state: ChunkState, layer: int, call: Call
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.place, boundary = state.store, (layer, call.of), call.before
        assert boundary is not None, "asked behind a border"
        ctx.boundary = boundary
        kept = state.store.context(layer, call.of, boundary + 1, boundary)
        taken = tuple(_own(part[0]) for part in kept)
        _seen(state, layer, call)
        return taken

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        ctx.store.add_window_gradient(*ctx.place, ctx.boundary, *(one[None] for one in gradients))
        return None, None, None, None


def _seen(state: ChunkState, layer: int, call: Call) -> None:
    """Free the states before ``call`` if no later call reads them, in forward-only passes."""
    store, document = state.store, call.of
    if state.training:
        return
    if document in store.followers:
        store.seen(layer, document, store.followers[document])
    elif call.before == len(store.boundaries.get(document, ())) - 1:
        store.release(layer, document)


def _own(row: Tensor) -> Tensor:
    """Return a tensor with ``row``'s storage that is not a view.

    Later writes to other rows of the buffer then do not change the tensor's version counter.
    """
    memory = row.untyped_storage()
    return row.new_empty(0).set_(memory, row.storage_offset(), row.size(), row.stride())


class _Leave(torch.autograd.Function):
    """Identity on ``outputs`` of a call that stores the call's final state.

    Its backward reads the state's gradient, which the next slice added to the store.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        final: Tensor,
        tail: Tensor,
        state: ChunkState,
        layer: int,
        call: Call,
    ) -> Tensor:
        ctx.store, ctx.place, boundary = state.store, (layer, call.document), call.after
        assert boundary is not None, "asked in front of a border"
        ctx.boundary = boundary
        rows = len(state.store.boundaries.get(call.document, ())) or boundary + 1
        state.store.append(layer, call.document, boundary, final[None], tail[None], rows)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        store, boundary = ctx.store, ctx.boundary
        # None if all that follows is in the chunk and goes through autograd alone
        of_final = of_tail = None
        if store.has_gradient(*ctx.place):
            gradients = store.gradient(*ctx.place, boundary, boundary + 1)
            of_final, of_tail = (part[0].clone() for part in gradients)
        if boundary == 0:
            store.release(*ctx.place)
        return gradient, of_final, of_tail, None, None, None
