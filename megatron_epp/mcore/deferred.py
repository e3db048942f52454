"""Megatron's linear layers, their weight gradients set aside where the plan splits a backward.

For the length of one iteration each ColumnParallelLinear and RowParallelLinear of the stage asks
here how to multiply (seams.COLUMN_LINEAR, ROW_LINEAR). In a chunk whose backward is split it
multiplies by :func:`megatron_epp.layers.deferred.deferred_linear`; in every other chunk by its own
function, so a plain B computes what it computed before. A plan that splits nothing on a stage
touches nothing.

What stays in I: the gradients of norms, biases and embeddings, and of a weight that a linear
borrows from the embedding (tied embeddings within one stage): autograd adds up both uses there.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_epp.ir import PlanError
from megatron_epp.layers.deferred import Aside, Linear, deferred_linear
from megatron_epp.mcore import seams

_LINEARS = (ColumnParallelLinear, RowParallelLinear)


def refuse_split(model: nn.Module) -> None:
    """Raise a PlanError unless every linear layer of ``model`` can set its weight's gradient aside.

    Transformer Engine's linears defer by themselves (delay_wgrad_compute, backward_dw), to a queue
    per module that this module does not speak to.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith(("transformer_engine", "megatron.core.extensions")) and any(
            parameter.dim() > 1 for parameter in module.parameters(recurse=False)
        ):
            raise PlanError(
                f"the plan splits backward into I and W, which {kind.__name__} ({name}) cannot do "
                "here; give --transformer-impl local, or leave wsplit out of --epp-levers"
            )
        if isinstance(module, _LINEARS) and module.gradient_accumulation_fusion:
            raise PlanError(
                "the plan splits backward into I and W, which cannot fuse gradient accumulation; "
                "give --no-gradient-accumulation-fusion, or leave wsplit out of --epp-levers"
            )


class Deferral:
    """The linears of one stage, but those ``besides``, for one iteration; a context."""

    def __init__(self, model: nn.Module, besides: Collection[nn.Module] = ()):
        self.linears = [
            module
            for module in model.modules()
            if isinstance(module, _LINEARS) and not any(module is other for other in besides)
        ]
        # A plain attribute, not a context variable: on a GPU backward has a thread of its own.
        self._aside: Aside | None = None

    def __enter__(self) -> "Deferral":
        assert all(map(seams.is_installed, (seams.COLUMN_LINEAR, seams.ROW_LINEAR)))
        for module in self.linears:
            module.epp_multiply = partial(self._multiply, module)
        return self

    def __exit__(self, *error: Any):
        for module in self.linears:
            del module.epp_multiply

    @contextmanager
    def into(self, aside: Aside | None) -> Iterator[None]:
        """Forwards in this context, recomputed ones too, leave weight gradients to ``aside``."""
        self._aside = aside
        try:
            yield
        finally:
            self._aside = None

    def _multiply(
        self,
        module: nn.Module,
        input: Tensor,
        weight: Parameter,
        *,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        gtp_remat_size: int = 1,
        **others: Any,
    ) -> Any:
        """The output, or NotImplemented where ``module`` is to multiply by itself."""
        deferred = (
            self._aside is not None
            and weight is module.weight
            and weight.requires_grad
            and input.requires_grad
            and gtp_remat_size == 1
        )
        if not deferred:
            return NotImplemented
        linear = Linear(weight, module.tp_group, sequence_parallel, allreduce_dgrad)
        return deferred_linear(input, bias, linear, self._aside)
