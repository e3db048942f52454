"""Recompute of only the activation in Megatron's experts, without repeated routing or dispatch.

    saved from F to B    input rows, output of the first linear, routing weight of each row
    recomputed in B      the activation times the routing weight: the input of the second linear

For local experts (core/transformer/mlp.py), Megatron's own forward computes the activation, with
the two linears replaced. Transformer Engine's grouped experts (core/transformer/moe/experts.py)
already support this recompute; here, their attribute ``activation_recompute`` is set for each
chunk.
"""

import copy
from functools import wraps
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megatron_epp.layers.recompute.outputs import DroppedOutputs, recomputable_all, saving_handle

ACTIVATION = "moe_act"


def wrap_activations(layer: MoELayer, dropped: DroppedOutputs) -> None:
    """Patch experts to recompute the activation in the backward of chunks that drop it.

    Args:
        layer: Megatron's MoE layer.
        dropped: Contains the names of the modules that the current chunk recomputes.
    """
    experts = layer.experts
    if hasattr(experts, "activation_recompute"):
        _tell(experts, dropped)
    for expert in getattr(experts, "local_experts", ()):
        _wrap(expert, dropped)


def _tell(experts: MegatronModule, dropped: DroppedOutputs) -> None:
    forward = experts.forward

    @wraps(forward)
    def wrapped(*args: Any, **others: Any) -> Any:
        experts.activation_recompute = ACTIVATION in dropped.modules
        return forward(*args, **others)

    experts.forward = wrapped


def _wrap(expert: MLP, dropped: DroppedOutputs) -> None:
    forward = expert.forward

    @wraps(forward)
    def wrapped(hidden: Tensor, per_token_scale: Tensor | None = None, **others: Any) -> Any:
        if ACTIVATION not in dropped.modules or per_token_scale is None or not len(hidden):
            return forward(hidden, per_token_scale, **others)
        inside, bias = expert.linear_fc1(hidden)

        def activated(inside: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            return (activation(expert, inside, bias, scale),)

        (active,), (handle,) = recomputable_all(activated, (inside, per_token_scale))
        output, output_bias = saving_handle(active, handle, lambda: expert.linear_fc2(active))
        if output_bias is not None:
            output = output + output_bias * per_token_scale.unsqueeze(-1)
        return output, None

    expert.forward = wrapped


def activation(expert: MLP, inside: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Return the input [t, ffn] of an expert's second linear.

    This function runs Megatron's own forward with both linears replaced.

    Args:
        expert: One of Megatron's local experts.
        inside: Output [t, inner] of the expert's first linear.
        bias: Bias [inner] of the first linear; None without bias.
        scale: Routing weight [t] of the rows.
    """
    between = copy.copy(expert)
    between._modules = {
        **expert._modules,
        "linear_fc1": _Computed(inside, bias),
        "linear_fc2": _Computed(),
    }
    output, _ = type(expert).forward(between, inside, scale)
    return output


class _Computed(nn.Module):
    """Replacement of a linear that returns ``output``, by default its input, and ``bias``."""

    def __init__(self, output: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        self._outputs = (output, bias)

    def forward(self, x: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = self._outputs
        return (x if output is None else output), bias
