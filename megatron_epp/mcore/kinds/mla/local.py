"""Multi-latent attention of Megatron's local modules, on CPU-only hosts.

Megatron's local attention does not know that V may have another size than Q and K, and norms of
queries that have no latent exist inside of Transformer Engine's linear alone.
"""

import copy
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_epp.mcore.kinds.local_layers import NORM_OF_MLP, local_attention_of


def fix_local_mla(layer: Any, config: Any) -> None:
    """Make the latent attention in ``layer``, submodules that describe one, as is wanted."""
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
    """Attention with heads of Q and K of ``k_channels``, of V of ``v_channels``: the second is what
    Megatron's attention shapes its output by; how long Q and K are it need not know. (It is built
    without these at first, to be thrown away.)"""

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
    """A norm in front of Megatron's linear, as Transformer Engine's has it inside. Its parameters
    are ``layer_norm_weight`` and ``layer_norm_bias``: checkpoints have the same keys."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any):
        super().__init__(input_size, output_size, config=config, **others)
        norm = WrappedTorchNorm(config, input_size, eps=config.layernorm_epsilon)
        for name, parameter in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)
        # No module of this one, whose parameters would have two names.
        self._norm = (norm,)

    def forward(self, input_: Tensor, *args: Any, **others: Any) -> Any:
        (norm,) = self._norm
        return super().forward(norm(input_), *args, **others)


class _NormedQueries(MLASelfAttention):
    """With a norm in front of the queries' projection of the hidden state."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": NormedColumnParallelLinear,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }
