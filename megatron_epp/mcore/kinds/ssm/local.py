"""Specs of SSM and linear-attention layers with Megatron's local modules.

Megatron has specs of these layers only with Transformer Engine's modules. The specs of this module
have the same checkpoint keys.
"""

from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_epp.mcore.kinds.local_layers import block_with, local_attention, local_submodules

_NORM_OF_DELTA = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}


def local_mamba(config: Any) -> ModuleSpec:
    """Return the spec of a Mamba-2 layer."""
    layer = local_submodules(config)
    submodules = MambaLayerSubmodules(
        norm=layer.input_layernorm,
        mixer=ModuleSpec(
            module=MambaMixer,
            submodules=MambaMixerSubmodules(
                in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
            ),
        ),
        mamba_bda=layer.self_attn_bda,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    return ModuleSpec(module=MambaLayer, submodules=submodules)


def local_gated_delta_net(config: Any) -> ModuleSpec:
    """Return the spec of a gated delta net layer."""
    delta = _delta(local_submodules(config).input_layernorm)
    return local_attention(config, delta, _NORM_OF_DELTA)


def _delta(norm: Any) -> ModuleSpec:
    """Return the spec of a gated delta net whose output norm is ``norm``."""
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear
        ),
    )


def local_gated_delta_net_block(config: Any, vp_stage: int | None) -> Any:
    """Return the spec of a GPTModel's layers on a stage, with gated delta nets.

    Gated delta nets replace attention in the layers that --linear-attention-freq selects.
    """
    linear = get_linear_attention_pattern(config)

    def changed(number: int, submodules: TransformerLayerSubmodules) -> dict[str, Any]:
        if not linear[number]:
            return {}
        return {
            "self_attention": _delta(submodules.input_layernorm),
            "sharded_state_dict_keys_map": submodules.sharded_state_dict_keys_map | _NORM_OF_DELTA,
        }

    return block_with(config, vp_stage, changed)
