"""Deferred weight gradients of Megatron's linears, for plans that split a backward into I and W.

During an iteration, each ColumnParallelLinear and RowParallelLinear of the stage calls a function
of this module to multiply (patch_points.COLUMN_LINEAR, ROW_LINEAR). In a chunk with a split
backward, the function uses :func:`megatron_epp.layers.wgrad.linear.deferred_linear`. In other
chunks, the linear layer multiplies as without this module. On a stage without split backwards,
nothing is patched.

Transformer Engine's linears defer by their own protocol (layers/wgrad/te_linear.py). Their forwards
are also wrapped during the iteration.

I computes the gradients of norms, biases, routers and embeddings, and of the weights of linears
that cannot defer (:func:`kept_in_input`). If embeddings are tied within a stage, I also computes
the output layer's weight gradient, because autograd sums it with the embedding's gradient. If a
linear of Transformer Engine adds its bias in the GEMM, W computes the bias gradient.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_epp.layers.wgrad.linear import DeferredWeightGrads, Linear, deferred_linear
from megatron_epp.layers.wgrad.te_linear import can_defer, deferred_forward
from megatron_epp.mcore.patching import patch_points
from megatron_epp.runtime.consensus import all_gathered

logger = logging.getLogger(__name__)

_LINEARS = (ColumnParallelLinear, RowParallelLinear)


def early_modules(model: Any, early: bool) -> tuple[nn.Module, ...]:
    """Return the modules whose backward runs in F, which therefore defer no gradients.

    ``early`` tells whether the LM head is fused. If so, the result is the output layer, otherwise
    ().
    """
    return (get_attr_wrapped_model(model, "output_layer"),) if early else ()


def kept_in_input(model: nn.Module) -> list[str]:
    """Return the class names of the linears whose weight gradients are computed in op ``I``.

    Transformer Engine's linears with a single weight can defer its gradient to W. Grouped linears,
    fused MLPs, and linears of a version of Transformer Engine without ``wgrad_store`` cannot.
    Megatron's linears cannot if they fuse gradient accumulation.
    """
    linears = (m for m in model.modules() if isinstance(m, _LINEARS) or _is_engines(m))
    return sorted({type(each).__name__ for each in linears if not _can_defer(each)})


def report_kept(models: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Log on rank 0 the linears of any rank whose weight gradients stay in ``I``.

    ``models`` are this rank's stage modules. All ranks of ``group`` must call this function.
    """
    every = all_gathered([name for model in models for name in kept_in_input(model)], group)
    if (names := sorted(set(chain.from_iterable(every)))) and group.rank() == 0:
        logger.info("split backward: I computes the weight gradients of %s", ", ".join(names))


def _can_defer(module: nn.Module) -> bool:
    if isinstance(module, _LINEARS):
        return not module.gradient_accumulation_fusion
    return can_defer(module)


def has_engines(model: nn.Module) -> bool:
    """Return whether ``model`` has a linear layer of Transformer Engine."""
    return any(map(_is_engines, model.modules()))


def _is_engines(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer of Transformer Engine, of any kind."""
    return type(module).__module__.startswith(
        ("transformer_engine", "megatron.core.extensions")
    ) and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


class Deferral:
    """Context in which the linears of one stage can defer weight gradients.

    The linears defer weight gradients only in the context :meth:`into`. Linears in ``besides`` are
    not patched; nor are linears that cannot defer.
    """

    def __init__(self, model: nn.Module, besides: Collection[nn.Module] = ()):
        modules = [m for m in model.modules() if not any(m is other for other in besides)]
        deferring = [module for module in modules if _can_defer(module)]
        self.linears = [module for module in deferring if isinstance(module, _LINEARS)]
        self.engines = [module for module in deferring if _is_engines(module)]
        self._own: list[Any] = []  # forwards set on the instances of ``engines``
        # An attribute, not a context variable, because on a GPU backward runs in another thread.
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
            del module.forward  # the method of the class is visible again
            if own is not None:
                module.forward = own
        self._own.clear()

    @contextmanager
    def into(self, deferred: DeferredWeightGrads | None) -> Iterator[None]:
        """Collect the weight gradients of all forwards in this context in ``deferred``.

        Recomputed forwards are included. With None, no weight gradient is deferred.
        """
        self._deferred = deferred
        try:
            yield
        finally:
            self._deferred = None

    def _run(self, module: Any, forward: Callable[..., Any], *args: Any, **others: Any) -> Any:
        # A forward without a graph (of a layer that backward recomputes) defers nothing.
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
        """Return the output, or NotImplemented if ``module`` must multiply without deferral."""
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
