"""Recompute of the activation alone in Megatron's experts: their first product is kept, nothing is
exchanged or routed again.

    kept from F to B    rows of tokens, the first linear's output, each row's weight
    made again in B     the activation, times the weight: what the second linear saves

Of local experts (core/transformer/mlp.py) the activation is run by Megatron's own forward, with
the two linears taken out. Transformer Engine's grouped experts know how themselves
(core/transformer/moe/experts.py): they are told, for each chunk anew.
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
    """Where the experts' activation is recomputed: what it gives is dropped once it is used.
    ``dropped``: what the layer drops."""
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
    """Output of ``expert`` up to its second linear, from its first's, [t, inner] -> [t, ffn], for
    rows that weigh ``scale`` [t]: Megatron's own forward between the linears."""
    between = copy.copy(expert)
    between._modules = {
        **expert._modules,
        "linear_fc1": _Computed(inside, bias),
        "linear_fc2": _Computed(),
    }
    output, _ = type(expert).forward(between, inside, scale)
    return output


class _Computed(nn.Module):
    """Replaces a linear: returns its input, or what was computed before."""

    def __init__(self, output: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        self._outputs = (output, bias)

    def forward(self, x: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = self._outputs
        return (x if output is None else output), bias
