"""A linear of all experts of a rank as one grouped product over a stack of their weights.

    in memory    weight of expert E-1 | ... | weight of expert 1 | weight of expert 0
    rows         those of expert E-1, ..., of expert 1, of expert 0; ends_E[i] ends those of place i

Megatron's buffers hold parameters from the last to the first. torch has no negative strides, so
place i of a stack is expert E - 1 - i, and rows come in the same order.

    F    Y_i  = X_i A_i^T
    B    dX_i = dY_i A_i
         dA_i = dY_i^T X_i    one matrix of all experts, which is added to their main_grad at once

The row numbers ``ends_E`` stay on the device. In bf16, each of the three products is one kernel.
For other dtypes, torch's function runs a loop over experts, and copies ``ends_E`` to the host.

Shape suffixes: t rows of all experts on this rank, E experts, K inputs and N outputs of the linear.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_ATTRIBUTE = "epp_stack"  # of a linear with a stack


class WeightStack:
    """Weights of one linear of all experts, and their gradients, each as one tensor [E, N, K].

    Shapes: E experts, N output channels, K input channels.

    Autograd does not reach the weights: the backward adds to their ``main_grad``. The backward of
    :func:`reported` then calls the attribute ``report`` with the weights, instead of running a hook
    for each weight.

    Args:
        weights: Weights of at least two experts, from the first to the last expert, for which
            :func:`distance` is not None.
    """

    def __init__(self, weights: Sequence[Parameter]):
        self.weights = tuple(weights)
        self._last: Any = self.weights[-1]  # Megatron's DDP sets main_grad
        self._first: Any = self.weights[0]
        self.report: Callable[[Sequence[Parameter]], None] = _no_report

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def weights_ENK(self) -> Tensor:
        """The weights, last expert first."""
        return _view(self._last.data, self._first.data, len(self))

    @property
    def gradients_ENK(self) -> Tensor:
        """The ``main_grad`` of the weights, last expert first."""
        return _view(self._last.main_grad, self._first.main_grad, len(self))

    def __call__(self, rows_tK: Tensor, ends_E: Tensor) -> Tensor:
        """Return the output [t, N] for rows in the order of the stack."""
        assert rows_tK.requires_grad or not torch.is_grad_enabled(), "weights would get no gradient"
        return _Linear.apply(rows_tK, ends_E, self)

    def lend_gradients(self) -> Sequence[Parameter]:
        """Add a ``main_grad`` to weights that lack it, and return them."""
        if hasattr(self._last, "main_grad"):
            return ()
        totals_ENK = torch.zeros_like(self.weights_ENK, dtype=torch.float32)
        weights: Iterator[Any] = reversed(self.weights)
        for weight, total_NK in zip(weights, totals_ENK, strict=True):
            weight.main_grad = total_NK
        return self.weights

    def add_gradient(self, grad_tN: Tensor, rows_tK: Tensor, ends_E: Tensor) -> None:
        """Add the weights' gradients to their ``main_grad``."""
        if not len(rows_tK):
            return
        gradients_ENK = self.gradients_ENK
        if _in_one_kernel(rows_tK):
            gradients_ENK.add_(torch._grouped_mm(grad_tN.t(), rows_tK, offs=ends_E))
        else:
            for place, part in _parts(ends_E):
                gradients_ENK[place] += grad_tN[part].t() @ rows_tK[part]


def reported(tensor: Tensor, stacks: Sequence[WeightStack]) -> Tensor:
    """Return ``tensor``, whose backward reports the weights of ``stacks``.

    Autograd runs nodes in the reverse order of their creation. If every product of the stacks
    follows this call, their gradients are complete when the backward of ``tensor`` runs.
    """
    return _Reported.apply(tensor, stacks)


def set_stack(linear: nn.Module, stack: WeightStack) -> None:
    """Make :func:`stacks_of` find the ``stack`` of ``linear``."""
    setattr(linear, _ATTRIBUTE, stack)


def stacks_of(model: nn.Module) -> list[WeightStack]:
    """Return the stacks of all linears of ``model`` that have one."""
    return [vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)]


def row_ends(counts_E: Tensor) -> Tensor:
    """Return the end of each expert's rows for the numbers of rows, both in a stack's order."""
    return counts_E.cumsum(0, dtype=torch.int32)


def distance(tensors: Sequence[Tensor]) -> int | None:
    """Return the distance between the starts of consecutive tensors in memory, in elements.

    There must be at least two tensors. The result is None unless they are contiguous, have the same
    shape and dtype, and lie in one storage in reverse order, at equal distances.
    """
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    alike = all(
        each.is_contiguous()
        and (each.shape, each.dtype) == (first.shape, first.dtype)
        and each.untyped_storage().data_ptr() == storage
        for each in tensors
    )
    starts = [int(each.storage_offset()) for each in tensors]
    steps = {one - other for one, other in pairwise(starts)}
    step = steps.pop()
    return step if alike and not steps and step >= first.numel() else None


def move_together(weights: Sequence[Parameter]) -> None:
    """Move the weights into one storage, the last weight first."""
    storage = torch.empty(
        len(weights), *weights[0].shape, dtype=weights[0].dtype, device=weights[0].device
    )
    for place, weight in zip(storage, reversed(weights), strict=True):
        place.copy_(weight.data)
        weight.data = place


def _no_report(weights: Sequence[Parameter]) -> None:
    """Do nothing, in a model without DDP."""


def _view(last: Tensor, first: Tensor, count: int) -> Tensor:
    """Return the tensors from ``last``, which lies first, to ``first`` as one tensor."""
    between = int(first.storage_offset()) - int(last.storage_offset())
    step, remainder = divmod(between, count - 1)
    assert step >= last.numel() and not remainder, "weights of experts were moved"
    return last.as_strided((count, *last.shape), (step, *last.stride()))


def _in_one_kernel(rows: Tensor) -> bool:
    return rows.dtype == torch.bfloat16


def _parts(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (place, its rows) for every place that has rows."""
    for place, (start, stop) in enumerate(pairwise((0, *ends_E.tolist()))):
        if start < stop:
            yield place, slice(start, stop)


def _products(rows_tK: Tensor, weights_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Return the product [t, N] of each expert's rows and its matrix."""
    if len(rows_tK) and _in_one_kernel(rows_tK):
        return torch._grouped_mm(rows_tK, weights_EKN, offs=ends_E)
    output_tN = rows_tK.new_empty(len(rows_tK), weights_EKN.shape[-1])
    for place, part in _parts(ends_E):
        torch.mm(rows_tK[part], weights_EKN[place], out=output_tN[part])
    return output_tN


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_tK: Tensor, ends_E: Tensor, stack: WeightStack) -> Tensor:
        ctx.save_for_backward(rows_tK, ends_E)
        ctx.stack = stack
        return _products(rows_tK, stack.weights_ENK.transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx: Any, grad_tN: Tensor):
        rows_tK, ends_E = ctx.saved_tensors
        grad_tN = grad_tN.contiguous()
        dinput_tK = _products(grad_tN, ctx.stack.weights_ENK, ends_E)
        ctx.stack.add_gradient(grad_tN, rows_tK, ends_E)
        return dinput_tK, None, None


class _Reported(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, stacks: Sequence[WeightStack]) -> Tensor:
        ctx.stacks = stacks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor):
        for stack in ctx.stacks:
            stack.report(stack.weights)
        return gradient, None
