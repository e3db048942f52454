"""Biases in the experts of Megatron's layers: two things that Megatron gets wrong.

Megatron adds an expert's last bias in place (core/transformer/mlp.py, ``output += output_bias``).
Of its local linears, and Transformer Engine's, what comes back is a view that a function of its own
made, on which autograd forbids that. So here it comes back as a tensor of its own.

With sequence parallelism that bias is marked as what every tensor-parallel rank has a part of the
gradient of (core/tensor_parallel/layers.py, RowParallelLinear), and the parts are summed over these
ranks (core/distributed/finalize_model_grads.py). But they hold different experts, or have seen one
expert's tokens all, or are summed as expert data parallel ranks: never is that sum a gradient. So
the mark is taken away.
"""

from functools import wraps
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def fix_expert_biases(layer: MoELayer) -> None:
    """Make the experts of ``layer`` take biases, whose gradients nobody else's are added to."""
    for parameter in layer.experts.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False
    for expert in getattr(layer.experts, "local_experts", ()):
        linear = expert.linear_fc2
        if linear.bias is not None and linear.bias.numel():  # Transformer Engine's none is empty
            linear.forward = _with_own_output(linear.forward)


def _with_own_output(forward: Any) -> Any:
    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = forward(*args, **others)
        return output.clone(), bias

    return wrapped
