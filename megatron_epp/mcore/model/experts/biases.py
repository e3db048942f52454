"""Biases in the experts of Megatron's local layers.

Megatron adds an expert's last bias in place (core/transformer/mlp.py, ``output += output_bias``).
Of its local linears, what comes back is a view that a function of its own made, on which autograd
forbids that. So here it comes back as a tensor of its own.
"""

from functools import wraps
from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def let_biases_be_added(layer: MoELayer) -> None:
    """Make the experts of ``layer`` take biases, where they are of Megatron's local linears."""
    for expert in getattr(layer.experts, "local_experts", ()):
        linear = expert.linear_fc2
        if isinstance(linear, RowParallelLinear) and linear.bias is not None:
            linear.forward = _with_own_output(linear.forward)


def _with_own_output(forward: Any) -> Any:
    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = forward(*args, **others)
        return output.clone(), bias

    return wrapped
