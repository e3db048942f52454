"""Outputs that are recomputed in backward instead of being saved.

    forward    x -> [module] -> y -> [consumer]      neither y nor the module's tensors are saved
    backward   the consumer needs y: the module runs again on x, which is saved anyway

Two kinds of tensors are dropped: y, which the consumer would save (a saved-tensor hook replaces it
by a handle), and the tensors other than x that the module would save. The module's backward uses
the recomputed tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class RecomputeHandle(Protocol):
    """Handle that recomputes a dropped tensor once, in backward."""

    def value(self) -> Tensor:
        """Recompute the tensor in the first call, and return it."""


class AttentionRecompute:
    """Handle that recomputes an attention's output and other values that its backward needs."""

    def __init__(self):
        self._node: Any = None
        self._run: Callable[[Any], tuple[Tensor, Any]] | None = None
        self._result: tuple[Tensor, Any] | None = None

    def of(self, node: Any, run: Callable[[Any], tuple[Tensor, Any]]):
        """Set the autograd node of the output, and the function that recomputes the output."""
        self._node, self._run = node, run

    def value(self) -> Tensor:
        """Recompute the output in the first call, and return it."""
        return self.result()[0]

    def result(self) -> tuple[Tensor, Any]:
        """Recompute the output and the other values in the first call, and return them."""
        if self._result is None:
            assert self._run is not None, "the output is asked for before its node's backward"
            with torch.no_grad():
                self._result = self._run(self._node)
        return self._result

    def taken(self) -> tuple[Tensor, Any]:
        """Return the result to the node's backward; break the reference cycle with the node."""
        result, self._node.recompute = self.result(), None
        self._node = self._run = self._result = None
        return result


class DroppedOutputs:
    """Registry of the outputs that modules of one layer drop, with their recompute handles.

    Attributes:
        modules: Names of the modules that drop their outputs in the current pass.
        handles: Dropped outputs and their handles, by the outputs' addresses.
    """

    def __init__(self):
        self.modules: frozenset[str] = frozenset()
        self.handles: dict[int, tuple[Tensor, RecomputeHandle]] = {}

    @contextmanager
    def by(self, modules: frozenset[str]) -> Iterator[None]:
        """Set ``modules`` within the context, and remove all handles at its end."""
        before, self.modules = self.modules, modules
        try:
            yield
        finally:
            self.modules = before
            self.handles.clear()

    def add(self, output: Tensor, handle: RecomputeHandle):
        """Register the handle of ``output``, which stays alive until :meth:`take` removes it."""
        self.handles[output.data_ptr()] = output, handle

    def take(self, tensor: Tensor, last: bool = True) -> RecomputeHandle | None:
        """Return the handle of ``tensor``, or None if the tensor was not dropped.

        ``tensor`` may be a view of all elements of the dropped output. With ``last``, the handle is
        removed, because no other module of this pass reads the output.
        """
        output, handle = self.handles.get(tensor.data_ptr(), (None, None))
        if output is None or output.numel() != tensor.numel():
            return None
        if last:
            del self.handles[tensor.data_ptr()]
        return handle


def recomputable(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, RecomputeHandle]:
    """Run ``function(x)``, saving only x for the backward.

    Return the output and the handle that recomputes it.
    """
    (output,), (handle,) = recomputable_all(lambda x: (function(x),), (x,))
    return output, handle


def recomputable_all(
    function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[RecomputeHandle, ...]]:
    """Run ``function(*inputs)``, saving only the inputs for the backward.

    Return the outputs and a recompute handle for each. All outputs share one backward. ``function``
    may also return one of its inputs, such as a weight; the gradient then sums over all its uses.
    """
    recompute = _Recompute(function)
    outputs = _Recomputable.apply(recompute, *inputs)
    return outputs, tuple(_Output(recompute, index) for index in range(len(outputs)))


def saving_handle(
    tensor: Tensor, handle: RecomputeHandle | None, function: Callable[[], Any]
) -> Any:
    """Run ``function``; where it would save ``tensor``, autograd saves ``handle`` instead.

    Without a handle, the tensor is saved.
    """
    return function() if handle is None else saving_handles([(tensor, handle)], function)


def saving_handles(
    dropped: Sequence[tuple[Tensor, RecomputeHandle]], function: Callable[[], Any]
) -> Any:
    """Run ``function``; where it would save a dropped tensor, autograd saves its handle instead."""
    handles = {tensor.data_ptr(): (tensor.numel(), handle) for tensor, handle in dropped}

    def pack(saved: Tensor) -> Any:
        numel, handle = handles.get(saved.data_ptr(), (None, None))
        if saved.numel() == numel:
            return handle, saved.size(), saved.stride()
        return saved

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        handle, size, stride = packed
        value = handle.value()
        return value.as_strided(size, stride, value.storage_offset())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function()


class _Recompute:
    """Second run of ``function``, in backward; this run records an autograd graph."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self.function = function
        # context of _Recomputable; reset in its backward, so that no cycle remains
        self.node: Any = None
        self.run: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def result(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the inputs and the recomputed outputs, which are computed in the first call."""
        if self.run is None:
            needed = self.node.needs_input_grad[1:]
            inputs = tuple(
                x.detach().requires_grad_(wanted)
                for x, wanted in zip(self.node.saved_tensors, needed, strict=True)
            )
            with torch.enable_grad():
                self.run = inputs, self.function(*inputs)
        return self.run


class _Output:
    """Recompute handle of one output of a function."""

    def __init__(self, recompute: _Recompute, index: int):
        self._recompute, self._index = recompute, index

    def value(self) -> Tensor:
        return self._recompute.result()[1][self._index].detach()


class _Recomputable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recompute: _Recompute, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.recompute, recompute.node = recompute, ctx
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return recompute.function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        recompute, ctx.recompute = ctx.recompute, None
        inputs, outputs = recompute.result()
        recompute.node = recompute.run = None
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward(
            [output for output, _ in pairs], [gradient for _, gradient in pairs]
        )
        return None, *(x.grad for x in inputs)
