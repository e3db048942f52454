"""MoE with latents (--moe-latent-size) in Megatron's local layers.

A token's hidden state is projected to fewer channels before dispatch and projected back after the
experts. Megatron builds these two projections only with Transformer Engine's linears.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor, nn


class DuplicatedLinear(nn.Linear):
    """Linear that corresponds to Transformer Engine's linear with parallel mode "duplicated".

    Every tensor-parallel rank has the full weight. With sequence parallelism each rank processes
    its own rows, so gradients are summed over the ranks (core/extensions/transformer_engine.py).
    """

    def __init__(self, inputs: int, outputs: int, config: Any, init_method: Any):
        shared = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        super().__init__(inputs, outputs, bias=config.add_bias_linear, **shared)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()), torch.no_grad():
                init_method(self.weight)
        for parameter in self.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the output, and None in place of the bias that Megatron's linears return."""
        return super().forward(x), None


class LatentMoELayer(MoELayer):
    """MoE layer with projections to latents; only the experts are built with the latent size."""

    def __init__(self, config: Any, submodules: MoESubmodules, *args: Any, **others: Any):
        bare = copy.copy(config)
        bare.moe_latent_size = None
        build = submodules.experts

        def experts(count: int, _: Any, **named: Any) -> Any:
            return build(count, config, **named)

        super().__init__(bare, replace(submodules, experts=experts), *args, **others)
        for module in self.modules():
            if getattr(module, "config", None) is bare:
                module.config = config
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.fc1_latent_proj = DuplicatedLinear(hidden, latent, config, config.init_method)
        self.fc2_latent_proj = DuplicatedLinear(
            latent, hidden, config, config.output_layer_init_method
        )


def fix_latent_experts(mlp: Any) -> Any:
    """Return ``mlp``, a layer's MLP builder, changed to build LatentMoELayer for MoELayer."""
    if getattr(mlp, "func", None) is not MoELayer:
        return mlp
    return partial(LatentMoELayer, *mlp.args, **mlp.keywords)
