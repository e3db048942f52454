"""Megatron's HybridModel where its modules are torch's, and with the hooks that its GPTModel has.

Megatron builds HybridModel of Transformer Engine's modules alone. On hosts without a GPU the same
layers are built of its local ones; checkpoints have the keys that Transformer Engine's give them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor


class LocalHybridStack(HybridStack):
    """With torch's norm behind its layers: Megatron's has Transformer Engine's written in."""

    def __init__(
        self,
        config: Any,
        submodules: HybridStackSubmodules,
        *,
        post_process: bool = True,
        post_layer_norm: bool = True,
        **others: Any,
    ):
        super().__init__(
            config, submodules, post_process=post_process, post_layer_norm=False, **others
        )
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_norm = WrappedTorchNorm(
                config, config.hidden_size, eps=config.layernorm_epsilon
            )


def local_stack_spec(config: Any) -> ModuleSpec:
    """Layers of attention, MLPs and experts as Megatron's hybrid_stack_spec has them, of its local
    modules; ``config``: its TransformerConfig."""
    whole = get_gpt_layer_local_submodules(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    attention = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=whole.input_layernorm,
            self_attention=whole.self_attention,
            self_attn_bda=whole.self_attn_bda,
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
            },
        ),
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=whole.mlp,
        mlp_bda=whole.mlp_bda,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1),
        mlp_bda=whole.mlp_bda,
    )
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=attention,
            mla_layer=attention,  # a model has one of the two
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
        ),
    )


def take_output_processor(model: HybridModel) -> None:
    """Give ``model`` the argument ``output_processor`` of GPTModel's forward: what makes its output
    of hidden states, in the place of the output layer and the loss."""
    plain: Callable[..., Tensor] = model.forward

    @wraps(plain)
    def forward(*inputs: Any, output_processor: Any = None, **others: Any) -> Tensor:
        if output_processor is None or not model.post_process:
            return plain(*inputs, **others)
        model.post_process = False  # the stack, which has the last norm, keeps its own
        try:
            hidden = plain(*inputs, **others)
        finally:
            model.post_process = True
        shares = model.share_embeddings_and_output_weights
        return output_processor(
            hidden_states=hidden,
            output_layer=model.output_layer,
            output_weight=model.shared_embedding_or_output_weight() if shares else None,
            labels=others.get("labels"),
            loss_mask=others.get("loss_mask"),
            runtime_gather_output=others.get("runtime_gather_output"),
            compute_language_model_loss=model.compute_language_model_loss,
            scale_logits=model._scale_logits,
            config=model.config,
        )

    model.forward = forward
