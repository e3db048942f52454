"""Fixes for two errors of Megatron with biases of experts.

Megatron adds an expert's last bias in place (core/transformer/mlp.py, ``output += output_bias``).
The output of its local linears and of Transformer Engine's is a view made by a custom function, on
which autograd forbids that. Here the output is a tensor of its own.

With sequence parallelism, Megatron marks that bias as if every tensor-parallel rank had a part of
its gradient (core/tensor_parallel/layers.py, RowParallelLinear), and sums these
(core/distributed/finalize_model_grads.py). But the ranks hold different experts, or have seen all
tokens of one expert, or are summed as expert-data-parallel ranks. That sum is never a gradient, so
the mark is removed.
"""

from functools import wraps
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def fix_expert_biases(layer: MoELayer) -> None:
    """Patch the experts of an MoE layer to support biases.

    Parameters lose the attribute ``sequence_parallel``, so that Megatron does not sum gradients of
    different experts. With a bias, the output of a second linear is copied.
    """
    for parameter in layer.experts.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False
    for expert in getattr(layer.experts, "local_experts", ()):
        linear = expert.linear_fc2
        # Transformer Engine's is empty if there is none.
        if linear.bias is not None and linear.bias.numel():
            linear.forward = _with_own_output(linear.forward)


def _with_own_output(forward: Any) -> Any:
    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = forward(*args, **others)
        return output.clone(), bias

    return wrapped
