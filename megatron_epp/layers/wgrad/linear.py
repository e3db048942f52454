"""Linear layers with deferred weight gradients (I and W).

    op   computes             graph
    F    Y  = X A^T (+ b)     the autograd graph leads to X and b, not to A
    I    dX = dY A, db        one root per linear is saved; its graph holds X and dY, and leads to A
    W    dA = dY^T X          one backward from all roots, of which it runs the newest first

A root is the output of an autograd graph. Saved-tensor hooks therefore see the tensors that op I
saves for W, and gradients accumulate as in any backward. Hooks on a weight fire once per W.

Shape suffixes: T rows of the chunk (t on this rank, if sequence parallelism shards them), K inputs
and N outputs of the linear on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True, slots=True)
class Linear:
    """Sharding of a linear layer over its tensor-parallel group.

    Attributes:
        weight_NK: [output channels, input channels] this rank's weight.
        group: tensor-parallel group; may be None unless ``gathers`` or ``reduces``.
        gathers: whether the forward all-gathers the input and the backward reduce-scatters the
            input's gradient (sequence parallelism).
        reduces: whether the backward all-reduces the input's gradient.
    """

    weight_NK: Parameter
    group: dist.ProcessGroup | None = None
    gathers: bool = False
    reduces: bool = False

    def __post_init__(self):
        assert not (self.gathers and self.reduces), "a scatter of sums has added them up"


class DeferredWeightGrads:
    """Weight gradients of one chunk, which op I defers to op W.

    For each run of a linear, the object stores an autograd root whose backward computes the weight
    gradient. If a layer runs several times per forward, its linears have several roots.

    Args:
        noticed: function that is called with every weight whose gradient is deferred; None for no
            call.
    """

    def __init__(self, noticed: Callable[[Parameter], None] | None = None):
        self._noticed = noticed
        self._roots: dict[Parameter, list[Tensor]] = {}
        self._with: dict[Parameter, Parameter] = {}  # bias -> weight whose root leads to it

    def __len__(self) -> int:
        return len(self._roots)

    def __contains__(self, parameter: Parameter) -> bool:
        return parameter in self._roots or parameter in self._with

    @property
    def weights(self) -> tuple[Parameter, ...]:
        """Weights whose gradients are deferred."""
        return tuple(self._roots)

    def add(self, linear: Linear, input_tK: Tensor, grad_TN: Tensor):
        """Defer the weight gradient of ``linear``: save the input and the output's gradient."""
        weight = linear.weight_NK
        # Detached: with its history the input would keep the chunk's whole graph alive until W.
        with torch.enable_grad():
            root = _WeightGradient.apply(weight, input_tK.detach(), grad_TN.detach(), linear)
        self.hold(root, weight)

    def hold(self, root: Tensor, weight: Parameter, bias: Parameter | None = None):
        """Store an autograd root whose backward computes the gradients of ``weight`` and ``bias``.

        ``bias`` is None if autograd computes the bias gradient in I. The method calls ``noticed``
        with the weight.
        """
        self._roots.setdefault(weight, []).append(root)
        if bias is not None:
            self._with[bias] = weight
        if self._noticed is not None:
            self._noticed(weight)

    def accumulate(self, parameter: Parameter):
        """Compute and accumulate the deferred gradient of ``parameter``; free the saved tensors.

        The hooks of the parameter run. Gradients of a bias and its weight are computed together.

        Raises:
            KeyError: if the gradient of ``parameter`` is not deferred.
        """
        weight = self._with.get(parameter, parameter)
        roots = self._roots.pop(weight)
        self._with = {bias: other for bias, other in self._with.items() if other is not weight}
        _run_backward(roots)

    def accumulate_all(self):
        """Compute and accumulate all deferred gradients, in one backward."""
        roots = [root for of_weight in self._roots.values() for root in of_weight]
        self._roots, self._with = {}, {}
        if roots:
            _run_backward(roots)


def _run_backward(roots: Sequence[Tensor]) -> None:
    """Run one backward from all ``roots``, so that hooks on a weight fire once."""
    # A root has no value and its gradient is not used; passing one avoids a fill with ones.
    torch.autograd.backward(roots, [root.detach() for root in roots])


def deferred_linear(
    input_tK: Tensor, bias_N: Tensor | None, linear: Linear, deferred: DeferredWeightGrads
):
    """Compute ``linear`` on an input; the backward defers the weight gradient.

    Args:
        input_tK: [local rows, ..., input channels] input, which must require a gradient, so that
            the backward runs.
        bias_N: [output channels] bias, or None.
        linear: the layer.
        deferred: object that stores the input and the output's gradient until W.

    Returns:
        The output [T, ..., N].
    """
    return _DeferredLinear.apply(input_tK, bias_N, linear, deferred)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_tK: Tensor,
        bias_N: Tensor | None,
        linear: Linear,
        deferred: DeferredWeightGrads,
    ) -> Tensor:
        ctx.save_for_backward(input_tK)
        ctx.linear, ctx.deferred, ctx.biased = linear, deferred, bias_N is not None
        input_TK = _gather(input_tK, linear) if linear.gathers else input_tK
        output_TN = torch.matmul(input_TK, linear.weight_NK.t())
        return output_TN if bias_N is None else output_TN + bias_N

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor):
        (input_tK,) = ctx.saved_tensors
        linear = ctx.linear
        ctx.deferred.add(linear, input_tK, grad_TN)
        dinput_tK = dinput_TK = grad_TN.matmul(linear.weight_NK)
        work = None
        if linear.reduces:
            work = dist.all_reduce(dinput_TK, group=linear.group, async_op=True)
        elif linear.gathers:
            dinput_tK = torch.empty_like(input_tK, memory_format=torch.contiguous_format)
            work = dist.reduce_scatter_tensor(
                dinput_tK, dinput_TK.contiguous(), group=linear.group, async_op=True
            )
        dbias_N = _rows(grad_TN).sum(0) if ctx.biased else None
        if work is not None:
            work.wait()
        return dinput_tK, dbias_N, None, None


class _WeightGradient(torch.autograd.Function):
    """Root whose backward computes the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight_NK: Parameter, input_tK: Tensor, grad_TN: Tensor, linear: Linear
    ) -> Tensor:
        # This rank's rows only: W gathers the others', as an unsplit backward would have.
        ctx.save_for_backward(input_tK, grad_TN)
        ctx.linear = linear
        return weight_NK.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor):
        input_tK, grad_TN = ctx.saved_tensors
        input_TK = _gather(input_tK, ctx.linear) if ctx.linear.gathers else input_tK
        return _rows(grad_TN).t().matmul(_rows(input_TK)), None, None, None


def _gather(shard_tK: Tensor, linear: Linear) -> Tensor:
    """Return the rows of all ranks of the group, in rank order."""
    rows, *others = shard_tK.shape
    full_TK = shard_tK.new_empty(rows * dist.get_world_size(linear.group), *others)
    dist.all_gather_into_tensor(full_TK, shard_tK.contiguous(), group=linear.group)
    return full_TK


def _rows(tensor: Tensor) -> Tensor:
    """Return [T, 1, N] as [T, N], for a product of two matrices."""
    return tensor.reshape(-1, tensor.shape[-1])
