"""Megatron's local modules in layers, on hosts without a GPU: what they lack beside Transformer
Engine's, or would refuse when they are built.

    context parallelism    local attention refuses it; ours takes its place before it ever runs
    latent attention       local attention does not know that V may have another size than Q and K
    norms of queries that have no latent    exist inside of Transformer Engine's linear alone
    norms of Q and K without weights (--qk-l2-norm)    are not passed on by Megatron's trainer
    experts on latents     their projections are Transformer Engine's (experts/latent_experts.py)
    layers of a HybridModel    are of Transformer Engine's modules alone

Checkpoints have the keys that Transformer Engine's layers give them.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_submodules,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

NORM_OF_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}

# ------------------------------------------------------------------ layers of a HybridModel


def local_submodules(config: Any, latents: bool = False) -> TransformerLayerSubmodules:
    """Submodules of a layer of attention and an MLP."""
    return get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latents,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )


def local_attention(config: Any, latents: bool) -> ModuleSpec:
    """Description of a layer of attention."""
    whole = local_submodules(config, latents)
    submodules = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def feed_forward(config: Any, experts: Any = None) -> TransformerLayerSubmodules:
    """Submodules of a layer of an MLP, or of ``experts``, whose norm has a name of its own."""
    whole = local_submodules(config)
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=experts or whole.mlp,
        mlp_bda=whole.mlp_bda,
        sharded_state_dict_keys_map={} if experts else {**NORM_OF_MLP},
    )


def block_with(
    config: Any,
    vp_stage: int | None,
    changed: Callable[[int, TransformerLayerSubmodules], dict[str, Any]],
) -> Any:
    """Description of a stage's layers of a GPTModel with another attention variant: plain ones, but
    for what is ``changed`` in the submodules of each, by its number in the model, from 0 on."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    block = copy.deepcopy(
        get_gpt_decoder_block_spec(
            plain,
            use_transformer_engine=False,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers: Any = range(first, first + len(block.layer_specs))
    if config.pipeline_model_parallel_layout is not None:
        numbers = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage
        )
    for at, number in enumerate(numbers):
        layer = block.layer_specs[at]
        submodules = replace(layer.submodules, **changed(number, layer.submodules))
        block.layer_specs[at] = replace(layer, submodules=submodules)
    return block


# ------------------------------------------------------------------ what they lack


def fix_local_attention(layer: Any, config: Any) -> None:
    """Make the attention over heads in ``layer``, submodules that describe one, as is wanted."""
    attention = _local_attention(layer, latents=False)
    if attention is None:
        return
    if config.context_parallel_size > 1:
        attention.core_attention = _as_for_one_rank
    if config.qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = L2Norm


def fix_local_mla(layer: Any, config: Any) -> None:
    """Make the latent attention in ``layer``, submodules that describe one, as is wanted."""
    attention = _local_attention(layer, latents=True)
    if attention is None:
        return
    attention.core_attention = _AttentionOfLatents
    if config.qk_layernorm and config.q_lora_rank is None:
        layer.self_attention.module = _NormedQueries
        attention.q_layernorm = IdentityOp
    layer.sharded_state_dict_keys_map = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }
    if not config.num_moe_experts:
        layer.sharded_state_dict_keys_map |= NORM_OF_MLP


def norm_as_engines(layer: Any) -> None:
    """Give the norm in front of experts the key that it has in Transformer Engine's layers: local
    ones write it under that of a dense layer."""
    names = getattr(layer.submodules_config, "sharded_state_dict_keys_map", {})
    kept = {ours: theirs for ours, theirs in names.items() if ours not in NORM_OF_MLP}
    layer.submodules_config = copy.copy(layer.submodules_config)
    layer.submodules_config.sharded_state_dict_keys_map = kept


def _local_attention(layer: Any, latents: bool) -> Any:
    """Submodules of the local attention that ``layer`` describes, with latents or without."""
    own = layer.self_attention
    submodules = getattr(own, "submodules", None)
    if getattr(submodules, "core_attention", None) is not DotProductAttention:
        return None
    return submodules if (own.module is MLASelfAttention) == latents else None


def _as_for_one_rank(config: Any, **others: Any) -> DotProductAttention:
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return DotProductAttention(config=alone, **others)


class _AttentionOfLatents(DotProductAttention):
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
