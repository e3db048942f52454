"""Low-rank adapters (LoRA) on a frozen model, which ``certify --lora-rank`` trains.

    y = W x + U D x      W [N, K] is frozen; D [r, K] and U [N, r] are trained

Megatron has no adapters, but frameworks add adapters to Megatron's linears; this module imitates
these frameworks. One of D and U is a linear of Megatron, sharded over the tensor-parallel ranks.
The other matrix is a torch linear, which every rank has in full:

    W sharded over N (linear_qkv, linear_fc1)    D full                            U sharded over N
    W sharded over K (linear_proj, linear_fc2)   D sharded over K                  U full
"""

from typing import Any, override

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of


class LowRankAdapter(MegatronModule):
    """Wrapper that adds an adapter to ``linear`` and keeps the linear's checkpoint keys."""

    def __init__(self, linear: Any, rank: int, gated: bool):
        super().__init__(linear.config)
        config, self.gated = linear.config, gated
        self.linear = linear
        how = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": linear.tp_group,
        }
        dtype, device = linear.weight.dtype, linear.weight.device
        if isinstance(linear, ColumnParallelLinear):
            self.down: Any = nn.Linear(
                linear.input_size, rank, bias=False, dtype=dtype, device=device
            )
            self.up: Any = ColumnParallelLinear(
                rank, linear.output_size, gather_output=False, **how
            )
            weight: Any = self.down.weight
        else:
            self.down = RowParallelLinear(linear.input_size, rank, input_is_parallel=True, **how)
            self.up = nn.Linear(rank, linear.output_size, bias=False, dtype=dtype, device=device)
            weight = self.up.weight
        config.init_method(weight)
        # Each rank processes its own rows, so finalize_model_grads must sum the gradients.
        setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    @property
    def weight(self) -> Tensor:
        """The frozen weight, which Megatron's Mamba mixer reads to save a checkpoint."""
        return self.linear.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the linear's output plus the adapter's output, and the linear's bias."""
        output, bias = self.linear(x)
        return output + _product(self.up, _product(self.down, x)), bias

    @override
    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = self.linear.sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in ("down", "up"):
            part = sharded_state_dict_default(
                getattr(self, name), f"{prefix}adapter.{name}.", sharded_offsets, metadata
            )
            if self.gated and name == "up":
                # As in Megatron's MLP for linear_fc1: every rank has rows of gate and value.
                key = f"{prefix}adapter.up.weight"
                part[key] = apply_swiglu_sharded_factory(
                    part[key],
                    sharded_offsets,
                    tp_group=self.linear.tp_group,
                    dp_group=metadata["dp_cp_group"],
                )
            state.update(part)
        return state


def _product(half: nn.Module, x: Tensor) -> Tensor:
    output = half(x)
    return output[0] if isinstance(output, tuple) else output


# Linears of attention, MLA, SSM and linear-attention layers; no layer has all of them.
_MIXERS = ("linear_qkv", "linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
           "linear_kv_down_proj", "linear_kv_up_proj", "in_proj", "out_proj")  # fmt: skip


def adapt(model: Any, rank: int) -> Any:
    """Freeze the unwrapped ``model``, and add adapters of rank ``rank`` to its layers' linears."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in dict.fromkeys(layers_of(model)):
        # In a HybridModel's layer, the mixer or the MLP is missing or has no linears.
        mixer = layer.mixer if hasattr(layer, "mixer") else layer.self_attention
        mlp: Any = getattr(layer, "mlp", None)
        for name in _MIXERS:
            if (linear := getattr(mixer, name, None)) is not None:
                setattr(mixer, name, LowRankAdapter(linear, rank, gated=False))
        if not hasattr(mlp, "linear_fc1"):
            continue
        mlp.linear_fc1 = LowRankAdapter(mlp.linear_fc1, rank, mlp.config.gated_linear_unit)
        mlp.linear_fc2 = LowRankAdapter(mlp.linear_fc2, rank, gated=False)
    return model


def gradient(parameter: Any, name: str) -> Tensor:
    """Return the attribute ``name`` (a gradient) of ``parameter``; zeros for a frozen parameter."""
    if not parameter.requires_grad:
        return torch.zeros_like(parameter.data)
    return getattr(parameter, name)
