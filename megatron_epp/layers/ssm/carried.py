"""States over the borders between slices: which rows one call of a kernel takes, what it begins
with, what it leaves.

    rows of a chunk     [slice of 0 . . .|doc 1 .|doc 2|padding]
    calls               [+ + slice of 0 . . .|doc 1 .|doc 2|padding]     one, where a slice is first
                         rows in front of a border, for the convolution

A kernel that knows where sequences end takes many of them in one call, but one state only: into the
first of them, and out of the last. So a slice behind a border begins a call, and a slice in front
of one ends it. At every border the store keeps a row: the state, and the W - 1 rows in front of it
that a convolution of W taps sees. Their gradients go back the same way.

A document that continues another begins with the state at a border of that: out of the store, or,
where both are in one chunk, straight from the call that left it.

A call that would be too long for a kernel's numbers of elements is made of several, whose states go
from one to the next through autograd.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.concatenated import concatenated

# What a kernel counts elements of one tensor with is 32 bits wide; sizes of heads, blocks and
# strides multiply what is addressed, so calls stay well below.
MOST_ELEMENTS = 2**30
BLOCK_ROWS = 128  # rows of a kernel's own blocks, as large as they come
# Attribute of a tensor of boundaries: the lengths of its sequences, which kernels' wrappers read on
# the host without a wait for the device.
HOST_LENGTHS = "epp_lengths"
WITHIN = -1  # the border between two calls of one slice


@dataclass(frozen=True, slots=True)
class Call:
    """Rows [start, stop) of a chunk that one call of a kernel takes: sequences of ``lengths``.

    before   border, of those of ``of``, whose state the first sequence begins with; None: it
             begins at the first position
    after    border, of those of ``document``, at which the last one leaves its state; None: nothing
             follows it
    of       the document whose border ``before`` is
    """

    start: int
    stop: int
    lengths: tuple[int, ...]
    document: int
    before: int | None = None
    after: int | None = None
    of: int = -1


def calls_of(state: ChunkState, channels: int, alone: bool = False) -> tuple[Call, ...]:
    """The calls for all rows of a chunk, of which each has so many ``channels``; once a chunk.

    ``alone``: of kernels that do not know where sequences end, so that each takes a call.
    """
    most = most_rows(channels)
    calls = _pieces if alone else _calls
    name = f"calls of {most} rows{', alone' * alone}"
    return state.once(name, lambda: tuple(calls(state, most)))


def most_rows(channels: int) -> int:
    """Rows of so many ``channels`` that one call may have."""
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
    """A call for each span and for the padding, and several for one of more than ``most`` rows."""
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
    """Borders at which the span of ``rows`` begins, of those of the document in front of it, and
    ends, of those of its own."""
    if not (rows.cut or rows.prefix):
        return None, None
    start, stop = rows.span.start, rows.span.stop
    boundaries = state.store.boundaries.get(rows.span.document)
    if boundaries is None:  # in calibration, which knows one slice alone
        boundaries = (start, stop) if start else (stop,)
    before = boundaries.index(start) if start else None
    if rows.prefix and not start:
        document, inputs = rows.context[-1]
        before = state.store.boundaries[document].index(inputs)
    return before, boundaries.index(stop) if rows.cut and not rows.last else None


class CarriedStates:
    """States and rows in front of borders, in one pass of a chunk through layer ``layer`` of the
    stage: a layer asks for them call by call, in order.

    ``taps`` of its convolution, or of each of its convolutions, whose channels lie one behind the
    other. A layer asks for the rows first (:meth:`front`), gives those that the next call would see
    (:meth:`after`), and hands in the state with the outputs (:meth:`leave`). ``alone``: each
    sequence is a call of its own.
    """

    def __init__(
        self, state: ChunkState, layer: int, taps: int, channels: int, alone: bool = False
    ):
        self.state, self.layer, self.taps, self.alone = state, layer, taps, alone
        self.calls, self.most = calls_of(state, channels, alone), most_rows(channels)
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}
        # Which call leaves the state of a document's border, of those in this chunk.
        self._leaves = {
            (call.document, call.after): number
            for number, call in enumerate(self.calls)
            if call.after not in (None, WITHIN)
        }
        self._finals: dict[int, Tensor] = {}
        self._tails: dict[int, list[Tensor]] = {}
        self._within: Tensor | None = None

    def of_calls(self, rows: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """``rows`` of the chunk, which are its dimension ``dim``, call by call."""
        return rows.split([call.stop - call.start for call in self.calls], dim)

    def front(self, number: int, rows_LC: Tensor, first: int = 0) -> Tensor | None:
        """The W - 1 rows [W-1, C] in front of call ``number``, which computes ``rows``, channels of
        them all from ``first`` on; None where a document begins."""
        call = self.calls[number]
        if call.before is None:
            return None
        if call.before == WITHIN:
            tail = self._tail(number - 1)
        elif (here := self._leaves.get((call.of, call.before))) is not None:
            tail = self._tail(here)
        else:
            if number not in self._taken:
                self._taken[number] = _Take.apply(rows_LC, self.state, self.layer, call)
            tail = self._taken[number][1]
        return tail[:, first : first + rows_LC.shape[1]]

    def _tail(self, number: int) -> Tensor:
        """The last W - 1 rows of call ``number``, all channels."""
        return concatenated(self._tails[number], 1)

    def initial(self, number: int) -> Tensor | None:
        """The state that call ``number`` begins with, once its front was asked for."""
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
        """``rows`` of call ``number``, those in front of it included, as its convolution saw them;
        of several convolutions one after the other."""
        call, wanted = self.calls[number], self.taps - 1
        if call.after is None:
            return
        if len(call.lengths) > 1:  # the slice behind whole documents sees nothing of theirs
            rows_LC = rows_LC[len(rows_LC) - call.lengths[-1] :]
        if len(rows_LC) < wanted:  # where its document begins
            nothing = rows_LC.new_zeros(wanted - len(rows_LC), rows_LC.shape[1])
            rows_LC = torch.cat((nothing, rows_LC))
        self._tails.setdefault(number, []).append(rows_LC[len(rows_LC) - wanted :])

    def leave(self, number: int, outputs: Tensor, final: Tensor | None) -> Tensor:
        """``outputs`` of call ``number``, with ``final``, the state behind its last row, kept where
        a border follows: what uses the outputs is what sends gradients back to it."""
        call = self.calls[number]
        if call.after is None:
            return outputs
        assert final is not None, "a call in front of a border gives its state"
        if call.after == WITHIN:
            self._within = final
            return outputs
        self._finals[number] = final
        return _Leave.apply(outputs, final, self._tail(number), self.state, self.layer, call)

    def wants_final(self, number: int) -> bool:
        return self.calls[number].after is not None

    def boundaries(self, number: int, front: int, device: torch.device) -> Tensor | None:
        """Where the sequences of call ``number`` begin and the last one ends, ``front`` rows in
        front of a border counted: int64, the same tensor for every layer of the chunk; None where
        calls are of one sequence each."""
        if self.alone:
            return None

        lengths = self.lengths(number, front)
        boundaries = self._once(
            "borders", number, front, device, lambda: torch.tensor([0, *accumulate(lengths)])
        )
        setattr(boundaries, HOST_LENGTHS, lengths)
        return boundaries

    def sequences(self, number: int, front: int, device: torch.device) -> Tensor | None:
        """[1, L] of which sequence each row of call ``number`` is, int32; None: there is one."""
        if len(self.calls[number].lengths) == 1:
            return None

        def make() -> Tensor:
            lengths = torch.tensor(self.lengths(number, front))
            return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]

        return self._once("sequences", number, front, device, make)

    def lengths(self, number: int, front: int) -> tuple[int, ...]:
        """Rows of the sequences of call ``number``, with ``front`` of them in front of a border."""
        first, *others = self.calls[number].lengths
        return first + front, *others

    def _once(
        self, what: str, number: int, front: int, device: torch.device, make: Callable[[], Tensor]
    ) -> Tensor:
        """``make()`` of the chunk's first layer that asks, on the device."""
        name = f"{what} of call {number} of {self.most} rows, behind {front}"
        return self.state.once(name, lambda: on_device(make(), device))


class _Take(torch.autograd.Function):
    """State and rows at the border that a call begins at, from the store; their gradients go
    there. ``rows``, those of the call, tie it into the graph."""

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
    """In evaluation: free the states of a document that nobody will begin with any more."""
    store, document = state.store, call.of
    if state.training:
        return
    if document in store.followers:
        store.seen(layer, document, store.followers[document])
    elif call.before == len(store.boundaries.get(document, ())) - 1:
        store.release(layer, document)


def _own(row: Tensor) -> Tensor:
    """The memory of ``row`` as no view: what is written beside it in the buffer, where borders
    behind this one are kept, is no change of it to autograd."""
    memory = row.untyped_storage()
    return row.new_empty(0).set_(memory, row.storage_offset(), row.size(), row.stride())


class _Leave(torch.autograd.Function):
    """``outputs`` as they are, the state behind them into the store; in backward it finds what the
    next slice left there for it."""

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
        of_final = of_tail = None  # where all that follows is in the chunk, through autograd alone
        if store.has_gradient(*ctx.place):
            gradients = store.gradient(*ctx.place, boundary, boundary + 1)
            of_final, of_tail = (part[0].clone() for part in gradients)
        if boundary == 0:
            store.release(*ctx.place)
        return gradient, of_final, of_tail, None, None, None
