"""Fixes for two errors of Megatron with biases of experts.

First, Megatron adds the bias of an expert's second linear in place (core/transformer/mlp.py,
``output += output_bias``). The outputs of local linears and of Transformer Engine's linears are
views created by a custom autograd function, and autograd forbids in-place changes of such views.
Here, the output is copied.

Second, with sequence parallelism, Megatron marks this bias as if every tensor-parallel rank had a
part of its gradient (core/tensor_parallel/layers.py, RowParallelLinear). It then sums the gradients
over the ranks (core/distributed/finalize_model_grads.py). The sum is always wrong: the ranks have
different experts, or each rank has processed all tokens of an expert, or the gradients are already
summed over expert-data-parallel ranks. Therefore the mark is removed.
"""

from functools import wraps
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor


def fix_expert_biases(layer: MoELayer) -> None:
    """Patch the experts of an MoE layer to support biases.

    The attribute ``sequence_parallel`` of parameters is set to False, so that Megatron does not sum
    gradients of different experts. The output of a second linear with a bias is copied.
    """
    for parameter in layer.experts.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False
    for expert in getattr(layer.experts, "local_experts", ()):
        linear = expert.linear_fc2
        # Transformer Engine's linear without bias has an empty tensor as bias.
        if linear.bias is not None and linear.bias.numel():
            linear.forward = _with_own_output(linear.forward)


def _with_own_output(forward: Any) -> Any:
    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = forward(*args, **others)
        return output.clone(), bias

    return wrapped
