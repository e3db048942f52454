"""MLA with Megatron's local modules, on CPU-only hosts.

Megatron's local attention requires V heads of the size of Q and K heads. For queries without a
latent, Megatron has a norm only inside Transformer Engine's linear. This module adds both features.
"""

import copy
from typing import Any, override

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_epp.mcore.kinds.local_layers import NORM_OF_MLP, local_attention_of


def fix_local_mla(layer: Any, config: Any) -> None:
    """Patch the local MLA in ``layer``, the submodules of one layer, in place."""
    attention = local_attention_of(layer, mla=True)
    if attention is None:
        return
    attention.core_attention = _LocalMLAAttention
    if config.qk_layernorm and config.q_lora_rank is None:
        layer.self_attention.module = _NormedQueries
        attention.q_layernorm = IdentityOp
    layer.sharded_state_dict_keys_map = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }
    if not config.num_moe_experts:
        layer.sharded_state_dict_keys_map |= NORM_OF_MLP


class _LocalMLAAttention(DotProductAttention):
    """Attention with Q and K heads of ``k_channels`` and V heads of ``v_channels``.

    Megatron's attention reads only ``v_channels``, for the shape of its output. ``k_channels`` and
    ``v_channels`` are None in a module that Megatron first builds and then drops.
    """

    def __init__(
        self,
        config: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **others: Any,
    ):
        shaped = copy.copy(config)
        shaped.kv_channels = v_channels or config.kv_channels
        shaped.context_parallel_size = 1
        super().__init__(config=shaped, **others)


class NormedColumnParallelLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear with a norm of its input, as in Transformer Engine.

    The parameters of the norm are named ``layer_norm_weight`` and ``layer_norm_bias``, as in
    Transformer Engine, so checkpoint keys are equal.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any):
        super().__init__(input_size, output_size, config=config, **others)
        norm = WrappedTorchNorm(config, input_size, eps=config.layernorm_epsilon)
        for name, parameter in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)
        # In a tuple, so that it is not a submodule, whose parameters would have two names.
        self._norm = (norm,)

    @override
    def forward(self, input_: Tensor, *args: Any, **others: Any) -> Any:
        (norm,) = self._norm
        return super().forward(norm(input_), *args, **others)


class _NormedQueries(MLASelfAttention):
    """MLASelfAttention with a norm of the hidden state before the projection of the queries."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": NormedColumnParallelLinear,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }
