"""Megatron's linear layers, their weight gradients set aside where the plan splits a backward.

For the length of one iteration each ColumnParallelLinear and RowParallelLinear of the stage asks
here how to multiply (patch_points.COLUMN_LINEAR, ROW_LINEAR). In a chunk whose backward is split it
multiplies by :func:`megatron_epp.layers.wgrad.linear.deferred_linear`; in every other chunk by its
own function, so a plain B computes what it computed before. A plan that splits nothing on a stage
touches nothing.

Transformer Engine's linears defer by a protocol of their own (layers/wgrad/te_linear.py): for as
long as their forward is wrapped.

What stays in I: the gradients of norms, biases and embeddings, and of a weight that a linear
borrows from the embedding (tied embeddings within one stage): autograd adds up both uses there.
Of Transformer Engine's linears, biases that are added inside the product go with the weight.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_epp.ir import PlanError
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads, Linear, deferred_linear
from megatron_epp.layers.wgrad.te_linear import can_defer, deferred_forward
from megatron_epp.mcore.patching import patch_points

_LINEARS = (ColumnParallelLinear, RowParallelLinear)


def early_modules(model: Any, early: bool) -> tuple[nn.Module, ...]:
    """Modules with no backward but in F, where the head is ``early``: nothing to defer."""
    return (get_attr_wrapped_model(model, "output_layer"),) if early else ()


def refuse_split(model: nn.Module, besides: Collection[nn.Module] = ()) -> None:
    """Raise a PlanError unless every linear layer of ``model``, but those ``besides``, can set its
    weight's gradient aside.

    Of Transformer Engine's, those of one weight can: neither its grouped linears, nor its MLPs in
    one piece, nor linears of a version that has no store for weight gradients.
    """
    for name, module in model.named_modules():
        if any(module is other for other in besides):
            continue
        if _is_engines(module) and not can_defer(module):
            raise PlanError(
                f"the plan splits backward into I and W, which {type(module).__name__} ({name}) "
                "cannot do; give --transformer-impl local, or leave wsplit out of --epp-levers"
            )
        if isinstance(module, _LINEARS) and module.gradient_accumulation_fusion:
            raise PlanError(
                "the plan splits backward into I and W, which cannot fuse gradient accumulation; "
                "give --no-gradient-accumulation-fusion, or leave wsplit out of --epp-levers"
            )


def has_engines(model: nn.Module) -> bool:
    """Whether a linear layer of ``model`` is Transformer Engine's."""
    return any(map(_is_engines, model.modules()))


def _is_engines(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer of Transformer Engine's, of whichever kind."""
    return type(module).__module__.startswith(
        ("transformer_engine", "megatron.core.extensions")
    ) and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


class Deferral:
    """The linears of one stage, but those ``besides``, for one iteration; a context."""

    def __init__(self, model: nn.Module, besides: Collection[nn.Module] = ()):
        modules = [m for m in model.modules() if not any(m is other for other in besides)]
        self.linears = [module for module in modules if isinstance(module, _LINEARS)]
        self.engines = [module for module in modules if _is_engines(module) and can_defer(module)]
        self._own: list[Any] = []  # of ``engines``: the forward that was set on the instance
        # A plain attribute, not a context variable: on a GPU backward has a thread of its own.
        self._deferred: DeferredWeightGrads | None = None

    def __enter__(self) -> "Deferral":
        assert all(
            map(patch_points.is_installed, (patch_points.COLUMN_LINEAR, patch_points.ROW_LINEAR))
        )
        for module in self.linears:
            module.epp_multiply = partial(self._multiply, module)
        for module in self.engines:
            self._own.append(vars(module).get("forward"))
            module.forward = partial(self._run, module, module.forward)
        return self

    def __exit__(self, *error: Any) -> None:
        for module in self.linears:
            del module.epp_multiply
        for module, own in zip(self.engines, self._own, strict=True):
            del module.forward  # the class's own shows again
            if own is not None:
                module.forward = own
        self._own.clear()

    @contextmanager
    def into(self, deferred: DeferredWeightGrads | None) -> Iterator[None]:
        """Forwards in this context, recomputed ones too, leave weight gradients to ``deferred``."""
        self._deferred = deferred
        try:
            yield
        finally:
            self._deferred = None

    def _run(self, module: Any, forward: Callable[..., Any], *args: Any, **others: Any) -> Any:
        # A forward without a graph, as of a layer that will be recomputed, leaves nothing.
        if self._deferred is None or not torch.is_grad_enabled() or not module.weight.requires_grad:
            return forward(*args, **others)
        return deferred_forward(module, forward, self._deferred, *args, **others)

    def _multiply(
        self,
        module: ColumnParallelLinear | RowParallelLinear,
        input: Tensor,
        weight: Parameter,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        gtp_remat_size: int = 1,
        output_dtype: torch.dtype | None = None,  # since 0.20
        **others: Any,
    ) -> Any:
        """The output, or NotImplemented where ``module`` is to multiply by itself."""
        deferred = (
            weight is module.weight
            and weight.requires_grad
            and input.requires_grad
            and gtp_remat_size == 1
            and output_dtype in (None, input.dtype)
        )
        if self._deferred is None or not deferred:
            return NotImplemented
        linear = Linear(weight, module.tp_group, sequence_parallel, allreduce_dgrad)
        return deferred_linear(input, bias, linear, self._deferred)
