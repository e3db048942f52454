"""HybridModel with Megatron's local modules, and with the output processor of GPTModel.

Megatron builds HybridModel only from Transformer Engine's modules. On CPU-only hosts, this module
builds its layers from Megatron's local modules. Checkpoint keys are equal in both cases.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.hybrid.pattern import mtp_symbols, symbols_of_layers
from megatron_epp.mcore.kinds.modules import KIND_MODULES
from megatron_epp.mcore.lm_head.fused_head import losses_of_each


class LocalHybridStack(HybridStack):
    """HybridStack with torch's final norm, in place of Transformer Engine's norm."""

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


def local_stack_spec(config: Any, pattern: str) -> ModuleSpec:
    """Return the spec of a HybridStack with local modules for the layers of ``pattern``.

    The spec replaces Megatron's hybrid_stack_spec, which uses Transformer Engine's modules.

    Args:
        config: The TransformerConfig.
        pattern: Layer symbols, as in --hybrid-layer-pattern.
    """
    symbols, layers = symbols_of_layers(pattern) + mtp_symbols(pattern), {}
    for kind in KIND_MODULES:
        if kind.KIND.STACK and kind.KIND.SYMBOL in symbols:
            layers[kind.KIND.STACK] = layer_spec = kind.local_layer(config)
            kind.fix_local(layer_spec.submodules, config)
    # The pattern determines the layers within an MTP layer.
    depth = get_mtp_layer_spec_for_backend(None, LocalSpecProvider())
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[depth])
    layers["mtp_block_spec"] = ModuleSpec(module=MultiTokenPredictionBlock, submodules=block)
    return ModuleSpec(module=LocalHybridStack, submodules=HybridStackSubmodules(**layers))


def take_output_processor(model: HybridModel | GPTModel) -> None:
    """Patch the forward of ``model`` to accept ``output_processor``, as GPTModel's forward does.

    ``output_processor`` is a callable that replaces the output layer and the loss. A GPTModel with
    MTP is patched, too, because its own forward computes the MTP losses before it calls the
    processor. If a model with MTP computes a chunk and no processor is given, the forward returns
    the losses [1 + D, T] of the decoder and of D MTP modules (:func:`.fused_head.losses_of_each`).
    """
    original: Callable[..., Tensor] = model.forward

    @wraps(original)
    def forward(*inputs: Any, output_processor: Any = None, **others: Any) -> Tensor:
        chunk = isinstance(others.get("packed_seq_params"), ChunkParams)
        if output_processor is None and chunk and model.config.mtp_num_layers:
            output_processor = losses_of_each
        if output_processor is None or not model.post_process:
            return original(*inputs, **others)
        model.post_process = False  # the decoder has its own attribute, and applies the final norm
        try:
            hidden = original(*inputs, **others)
        finally:
            model.post_process = True
        is_tied = model.share_embeddings_and_output_weights
        return output_processor(
            hidden_states=hidden,
            output_layer=model.output_layer,
            output_weight=model.shared_embedding_or_output_weight() if is_tied else None,
            labels=others.get("labels"),
            loss_mask=others.get("loss_mask"),
            runtime_gather_output=others.get("runtime_gather_output"),
            compute_language_model_loss=model.compute_language_model_loss,
            scale_logits=model._scale_logits,
            config=model.config,
        )

    model.forward = forward
