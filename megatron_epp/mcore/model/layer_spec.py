"""How layers are built where the attention is ours: Megatron's own layers, but for what its local
modules, on hosts without a GPU, would refuse or leave out when they are built.

    context parallelism    local attention refuses it; ours takes its place before it ever runs
    latent attention       local attention does not know that V may have another size than Q and K
    norms of queries that have no latent    exist inside of Transformer Engine's linear alone
    norms of Q and K without weights (--qk-l2-norm)    are not passed on by Megatron's trainer
    HybridModel    is of Transformer Engine's modules alone (hybrid/stack.py)

Checkpoints have the keys that Transformer Engine's layers give them.
"""

import copy
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.training import argument_utils
from megatron.training.models.gpt import default_layer_spec
from megatron.training.models.hybrid import HybridModelConfig

from megatron_epp.mcore.model.hybrid.stack import local_stack_spec
from megatron_epp.mcore.model.normed_linear import NormedColumnParallelLinear


def described(args: Any) -> Any:
    """The description of the model of Megatron's ``args`` that its trainer builds from: of a
    HybridModel where they have a pattern, else of a GPTModel."""
    if args.hybrid_layer_pattern is None:
        return argument_utils.gpt_config_from_args(args)
    return argument_utils.hybrid_config_from_args(args)


def mend_layer_spec(description: Any) -> None:
    """Make the model that ``description`` (:func:`described`) builds have such layers."""
    if isinstance(description, HybridModelConfig):
        _mend_stack(description)
        return
    wanted, config = description.transformer_layer_spec, description.transformer
    lacking = config.multi_latent_attention or config.qk_l2_norm
    if not lacking and config.context_parallel_size == 1:
        return

    def spec(description: Any, vp_stage: int | None = None) -> Any:
        if wanted is None:
            made = default_layer_spec(description, vp_stage)
        else:
            made = copy.deepcopy(wanted if isinstance(wanted, ModuleSpec) else wanted(description))
        # Layers of one kind are one description; of several kinds, a list of them, by reference.
        for layer in getattr(made, "layer_specs", None) or [made]:
            _mend(layer.submodules, description.transformer)
        return made

    description.transformer_layer_spec = spec


def _mend_stack(description: HybridModelConfig) -> None:
    config = description.transformer
    if config.transformer_impl != "local" or description.hybrid_stack_spec is not None:
        return
    spec = local_stack_spec(config)
    _mend(spec.submodules.attention_layer.submodules, config)
    description.hybrid_stack_spec = spec


def _mend(layer: Any, config: Any) -> None:
    attention = layer.self_attention.submodules
    if attention.core_attention is not DotProductAttention:
        return
    if layer.self_attention.module is MLASelfAttention:
        attention.core_attention = _AttentionOfLatents
        if config.qk_layernorm and config.q_lora_rank is None:
            layer.self_attention.module = _NormedQueries
            attention.q_layernorm = IdentityOp
        layer.sharded_state_dict_keys_map = {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
        if not config.num_moe_experts:
            layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        return
    if config.context_parallel_size > 1:
        attention.core_attention = _as_for_one_rank
    if config.qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = L2Norm


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


class _NormedQueries(MLASelfAttention):
    """With a norm in front of the queries' projection of the hidden state, as Transformer Engine's
    linear has it inside."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": NormedColumnParallelLinear,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }
