"""Layers of DeepSeek's sparse attention, of Megatron's local modules: it has their duplicated
linears of Transformer Engine's alone.

Checkpoints have the keys that Transformer Engine's layers give them.
"""

from dataclasses import replace
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
    get_moe_layer_pattern,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_epp.mcore.kinds.local_layers import NORM_OF_MLP, block_with, local_submodules
from megatron_epp.mcore.kinds.moe.local import DuplicatedLinear


class _Duplicated(DuplicatedLinear):
    """As layers of an indexer are built."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, init_method: Any, **_: Any):
        super().__init__(inputs, outputs, config, init_method)


class _Modules(LocalSpecProvider):
    """Megatron's local modules, with what they lack."""

    def linear(self) -> type:
        return _Duplicated


def _sparse(config: Any) -> ModuleSpec:
    """The attention, whose latents are made as those of Megatron's local ones."""
    made = get_dsa_module_spec_for_backend(config, _Modules())
    down = {f"linear_{one}_down_proj": ColumnParallelLinear for one in ("q", "kv")}
    return replace(made, submodules=replace(made.submodules, **down))


def local_dsa(config: Any) -> ModuleSpec:
    """Description of a layer of sparse attention."""
    whole = local_submodules(config)
    submodules = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=_sparse(config),
        self_attn_bda=whole.self_attn_bda,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def local_dsa_block(config: Any, vp_stage: int | None) -> Any:
    """Description of a stage's layers of a GPTModel, with sparse attention in each."""
    attention = _sparse(config)
    experts = get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers

    def changed(number: int, _: TransformerLayerSubmodules) -> dict[str, Any]:
        # Norms of attention and of experts stand alone, as in Transformer Engine's layers.
        keys = {} if experts[number] else {**NORM_OF_MLP}
        return {"self_attention": attention, "sharded_state_dict_keys_map": keys}

    return block_with(config, vp_stage, changed)
