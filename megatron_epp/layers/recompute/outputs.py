"""Outputs that are not kept for backward: made again when somebody asks for them.

    forward    x -> [module] -> y -> [consumer]      the consumer would save y, the module more
    backward   the consumer asks for y: the module runs again on x, which is kept anyway

What is dropped is what the consumer saves of y (a hook on what autograd saves puts a promise in its
place) and what the module saves beside x. The module's own backward then uses what was made again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Promise(Protocol):
    """Makes a dropped tensor again, once, in backward."""

    def value(self) -> Tensor: ...


class AttendAgain:
    """The promise of an attention's output, and of what else its backward takes.

    ``of`` says which node of autograd's made the output, and what makes it again from that.
    """

    def __init__(self):
        self._node: Any = None
        self._once_more: Callable[[Any], tuple[Tensor, Any]] | None = None
        self._made: tuple[Tensor, Any] | None = None

    def of(self, node: Any, once_more: Callable[[Any], tuple[Tensor, Any]]):
        self._node, self._once_more = node, once_more

    def value(self) -> Tensor:
        return self.result()[0]

    def result(self) -> tuple[Tensor, Any]:
        if self._made is None:
            assert self._once_more is not None, "a promise is kept before its node's backward"
            with torch.no_grad():
                self._made = self._once_more(self._node)
        return self._made

    def forget(self):
        """In the node's backward: no cycle stays."""
        self._node = self._once_more = self._made = None


class Dropped:
    """What one layer drops right now: promises by where the dropped tensor's data begin.

    ``modules`` are those that drop their output; set around every pass through the layer.
    """

    def __init__(self):
        self.modules: frozenset[str] = frozenset()
        self._promises: dict[int, tuple[Tensor, Promise]] = {}

    @contextmanager
    def by(self, modules: frozenset[str]) -> Iterator[None]:
        before, self.modules = self.modules, modules
        try:
            yield
        finally:
            self.modules = before
            self._promises.clear()

    def promise(self, output: Tensor, promise: Promise):
        """``output`` need not be kept; it is held until its consumer has taken the promise."""
        self._promises[output.data_ptr()] = output, promise

    def take(self, tensor: Tensor, last: bool = True) -> Promise | None:
        """The promise for ``tensor`` or for the tensor that it is a view of, all of it; ``last``:
        nobody else in this pass will ask for it."""
        output, promise = self._promises.get(tensor.data_ptr(), (None, None))
        if output is None or output.numel() != tensor.numel():
            return None
        if last:
            del self._promises[tensor.data_ptr()]
        return promise


def remade(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Promise]:
    """``function(x)``, keeping x alone; and the promise to make it again."""
    again = _Again(function)
    return _Remade.apply(x, again), again


def remade_all(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Promise, ...]]:
    """``function(*inputs)``, several outputs, keeping the inputs alone; and a promise for each.

    The backward of what is inside is one, of all outputs: a weight that is used outside, too, may
    be returned among them, and then has one gradient, the sum of both.
    """
    again = _AllAgain(function)
    outputs = _RemadeAll.apply(again, *inputs)
    return outputs, tuple(_OneOf(again, index) for index in range(len(outputs)))


def without(tensor: Tensor, promise: Promise | None, function: Callable[[], Any]) -> Any:
    """``function()``, which saves ``tensor``, with the promise saved in its place."""
    return function() if promise is None else without_all([(tensor, promise)], function)


def without_all(promised: Sequence[tuple[Tensor, Promise]], function: Callable[[], Any]) -> Any:
    """``function()``, which saves tensors, with each one's promise saved in its place."""
    places = {tensor.data_ptr(): (tensor.numel(), promise) for tensor, promise in promised}

    def pack(saved: Tensor) -> Any:
        numel, promise = places.get(saved.data_ptr(), (None, None))
        if saved.numel() == numel:
            return promise, saved.size(), saved.stride()
        return saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        made, size, stride = packed
        value = made.value()
        return value.as_strided(size, stride, value.storage_offset())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function()


class _Again:
    """A run of ``function`` in backward, with the graph through which its gradient goes."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        self.function = function
        self.node: Any = None  # _Remade's context; given back in its backward: no cycle stays
        self.run: tuple[Tensor, Tensor] | None = None

    def value(self) -> Tensor:
        return self.made()[1].detach()

    def made(self) -> tuple[Tensor, Tensor]:
        """(the input, the output that hangs on it)."""
        if self.run is None:
            (x,) = self.node.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                self.run = x, self.function(x)
        return self.run


class _Remade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, again: _Again) -> Tensor:
        ctx.save_for_backward(x)
        ctx.again, again.node = again, ctx
        with torch.no_grad():
            return again.function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        again, ctx.again = ctx.again, None
        x, output = again.made()
        again.node = again.run = None
        torch.autograd.backward(output, gradient)
        return x.grad, None


class _AllAgain:
    """A run of ``function`` in backward, with its graph."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self.function = function
        self.node: Any = None  # given back in its backward: no cycle stays
        self.run: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def made(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(the inputs, the outputs that hang on them)."""
        if self.run is None:
            needed = self.node.needs_input_grad[1:]
            inputs = tuple(
                x.detach().requires_grad_(wanted)
                for x, wanted in zip(self.node.saved_tensors, needed, strict=True)
            )
            with torch.enable_grad():
                self.run = inputs, self.function(*inputs)
        return self.run


class _OneOf:
    """The promise of one output of several."""

    def __init__(self, again: _AllAgain, index: int):
        self._again, self._index = again, index

    def value(self) -> Tensor:
        return self._again.made()[1][self._index].detach()


class _RemadeAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: _AllAgain, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.again, again.node = again, ctx
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return again.function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        again, ctx.again = ctx.again, None
        inputs, outputs = again.made()
        again.node = again.run = None
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([output for output, _ in pairs], [given for _, given in pairs])
        return None, *(x.grad for x in inputs)
