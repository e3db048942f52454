"""Megatron's local modules on CPU-only hosts, extended by features of Transformer Engine's modules.

    context parallelism        Megatron's local attention refuses it; here, elastic attention
                               replaces the forward, so the check is disabled
    --qk-l2-norm               Megatron's trainer does not pass it to local layers
    layers of a HybridModel    in Megatron, they exist only with Transformer Engine's modules

Checkpoint keys are the keys of Transformer Engine's layers.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

NORM_OF_QKV = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
NORM_OF_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}

# ------------------------------------------------------------------ layers of a HybridModel


def local_submodules(config: Any, mla: bool = False) -> TransformerLayerSubmodules:
    """Return the submodules of Megatron's local layer with attention (or MLA) and an MLP."""
    # Imported here: Megatron 0.16, whose models external training loops slice, lacks it.
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    return get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=mla,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )


def local_attention(
    config: Any, attention: Any = None, keys: Mapping[str, str] = NORM_OF_QKV, mla: bool = False
) -> ModuleSpec:
    """Return the spec of a layer that contains only attention.

    Args:
        config: The TransformerConfig.
        attention: Spec of the attention; None selects multi-head attention or MLA.
        keys: Local key -> checkpoint key, for the norm before the attention.
        mla: Whether to build MLA if ``attention`` is None.
    """
    layer = local_submodules(config, mla)
    submodules = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=attention or layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
        sharded_state_dict_keys_map={**keys},
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def feed_forward(config: Any, experts: Any = None) -> TransformerLayerSubmodules:
    """Return the submodules of a layer that contains only an MLP, or only the MoE ``experts``."""
    layer = local_submodules(config)
    return TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm,
        mlp=experts or layer.mlp,
        mlp_bda=layer.mlp_bda,
        sharded_state_dict_keys_map={} if experts else {**NORM_OF_MLP},
    )


def block_with(
    config: Any,
    vp_stage: int | None,
    changed: Callable[[int, TransformerLayerSubmodules], dict[str, Any]],
) -> Any:
    """Return the spec of a GPTModel's layers on a stage, with some submodules replaced.

    Args:
        config: The TransformerConfig.
        vp_stage: Index of the stage on its rank; None without interleaving.
        changed: Function (number of the layer in the model, from 0; its submodules) -> the
            replaced submodules by name.
    """
    copied = copy.copy(config)
    copied.experimental_attention_variant = None
    block = copy.deepcopy(
        get_gpt_decoder_block_spec(
            copied,
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
    """Patch local multi-head attention in ``layer`` for context parallelism and QK L2 norm.

    ``layer`` contains the submodules of a layer and is changed in place. Attention of other kinds
    does not change.
    """
    attention = local_attention_of(layer, mla=False)
    if attention is None:
        return
    if config.context_parallel_size > 1:
        attention.core_attention = _as_for_one_rank
    if config.qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = L2Norm


def norm_as_engines(layer: Any) -> None:
    """Set the checkpoint key of the norm before an MoE to the key of Transformer Engine's layers.

    Megatron's local layers would save this norm with the key that it has before a dense MLP.
    """
    names = getattr(layer.submodules_config, "sharded_state_dict_keys_map", {})
    kept = {
        local_name: engine for local_name, engine in names.items() if local_name not in NORM_OF_MLP
    }
    layer.submodules_config = copy.copy(layer.submodules_config)
    layer.submodules_config.sharded_state_dict_keys_map = kept


def local_attention_of(layer: Any, mla: bool) -> Any:
    """Return the submodules of ``layer``'s local attention: MLA if ``mla``, else other attention.

    Return None if ``layer`` has no such local attention.
    """
    own = layer.self_attention
    submodules = getattr(own, "submodules", None)
    if getattr(submodules, "core_attention", None) is not DotProductAttention:
        return None
    return submodules if (own.module is MLASelfAttention) == mla else None


def _as_for_one_rank(config: Any, **others: Any) -> DotProductAttention:
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return DotProductAttention(config=alone, **others)
