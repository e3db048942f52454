"""Deferred weight gradients of Transformer Engine's linears.

A linear passes the operands of its weight gradient to its ``wgrad_store`` (delay_wgrad_compute;
checked in version 2.20):

    forward    remembers module.wgrad_store
    backward   store.put([input, output's gradient], product); returns no weight gradient
    W          store.pop(): product(input, gradient) -> (dA, db)

The module's own store is a queue, which requires ops W in the order of ops I, and the module's
hooks bypass autograd. Each deferred forward therefore gets a store that adds an autograd root to a
:class:`~megatron_epp.layers.wgrad.linear.DeferredWeightGrads`, as for other linears.

In a deferred forward, the weight is replaced by another leaf with the same data. Otherwise autograd
would reach the weight in op I without a gradient, and run the hooks that must run in op W.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_epp.layers.wgrad.linear import DeferredWeightGrads

# product(input, gradient of the output) -> (gradient of the weight, of the bias or None, ...)
Product = Callable[..., Sequence[Tensor | None]]


def can_defer(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear with a ``wgrad_store`` and exactly one weight."""
    named = getattr(module, "weight_names", None)
    wanted = ("apply_bias", "gemm_bias_unfused_add", "fuse_wgrad_accumulation", "wgrad_store")
    return (
        named is not None
        and list(named) == ["weight"]
        and all(hasattr(module, name) for name in wanted)
    )


def deferred_forward(
    module: Any, forward: Callable[..., Any], deferred: DeferredWeightGrads, *args, **others
):
    """Run ``forward(*args, **others)`` of ``module`` with weight gradients deferred to W.

    The backward of the output adds a root to ``deferred``; the root's backward computes the weight
    gradient. During the forward, the module's ``wgrad_store`` and parameters are replaced; they are
    restored afterwards.
    """
    store = _DeferringStore(module, deferred)
    parameters, own = module._parameters, module.wgrad_store
    real = {name: parameters[name] for name in store.leaves}
    parameters.update(store.leaves)
    module.wgrad_store = store
    try:
        return forward(*args, **others)
    finally:
        parameters.update(real)
        module.wgrad_store = own


class _DeferringStore:
    """Replacement of ``module.wgrad_store`` during one forward and its backward.

    ``leaves`` replace the module's weight and, if the product for the weight gradient also computes
    the bias gradient, the bias. If the product does not, autograd computes the bias gradient.
    """

    def __init__(self, module: Any, deferred: DeferredWeightGrads):
        in_product = module.apply_bias and not module.gemm_bias_unfused_add
        self._deferred, self._fused = deferred, module.fuse_wgrad_accumulation
        self._weight: Parameter = module.weight
        self._bias: Parameter | None = module.bias if in_product else None
        self.leaves = {"weight": Parameter(self._weight.detach())}
        if self._fused:
            # For a product that adds its result itself. The leaf must live until backward, which
            # finds it by a weak reference.
            setattr(self.leaves["weight"], "main_grad", self._weight.main_grad)  # noqa: B010
        if self._bias is not None:
            self.leaves["bias"] = Parameter(self._bias.detach())

    def delay_wgrad_compute(self) -> bool:
        return True

    def put(self, tensors: Sequence[Any], product: Product) -> None:
        # Detached: with its history the input would keep the chunk's whole graph alive until W.
        parts = [_taken_apart(tensor) for tensor in tensors]
        held = [part for _, own in parts for part in own]
        own_bias = self.leaves.get("bias")

        def compute(*held: Tensor | None) -> Sequence[Tensor | None]:
            queue = list(held)
            gradient, of_bias, *_ = product(*(_put_together(one, queue) for one, _ in parts))
            if of_bias is None and own_bias is not None:  # quantised operands: accumulated in I
                of_bias = own_bias.grad
            return gradient, of_bias

        with torch.enable_grad():
            root = _Product.apply(self._weight, self._bias, compute, self._fused, *held)
        self._deferred.hold(root, self._weight, self._bias)


def _taken_apart(tensor: Any) -> tuple[Any, list[Tensor | None]]:
    """Split an operand into its wrapper (None for a torch tensor) and its tensors.

    The tensors of a quantised operand are its data and scales (``prepare_for_saving``).
    """
    if isinstance(tensor, Tensor):
        return None, [tensor.detach()]
    parts, shell = tensor.prepare_for_saving()
    return (shell, len(parts)), parts


def _put_together(shell: tuple[Any, int] | None, queue: list[Tensor | None]) -> Any:
    """Return the operand with wrapper ``shell``; pop its tensors from the front of ``queue``."""
    if shell is None:
        return queue.pop(0)
    emptied, count = shell
    emptied.restore_from_saved(queue[:count])
    del queue[:count]
    return emptied


class _Product(torch.autograd.Function):
    """Autograd function whose backward computes a linear's weight gradient, for W.

    The forward saves the operands and returns an empty scalar, the root of the backward. The
    backward calls ``product`` on the operands and returns the gradients of weight and bias. With
    ``fused``, ``product`` adds the weight gradient to ``main_grad``, and a placeholder is returned.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Parameter,
        bias: Parameter | None,
        product: Product,
        fused: bool,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.weight, ctx.biased, ctx.product, ctx.fused = weight, bias is not None, product, fused
        return torch.empty((), dtype=weight.dtype, device=weight.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor):
        gradient, bias_gradient, *_ = ctx.product(*ctx.saved_tensors)
        if ctx.fused:
            gradient = _added(ctx.weight)
        if not ctx.biased:
            bias_gradient = None
        return gradient, bias_gradient, None, None, *(None for _ in ctx.saved_tensors)


def _added(weight: Parameter) -> Tensor | None:
    """Return a placeholder for a gradient that was added to ``main_grad``.

    Megatron's gradient-reduction hook requires a gradient, and discards the placeholder.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    factory = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return factory(weight.shape, dtype=weight.dtype, device=weight.device)  # also for an fp8 weight
