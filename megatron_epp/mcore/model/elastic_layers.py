"""Patches of Megatron's layers to compute chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from megatron_epp.layers.recompute.outputs import DroppedOutputs
from megatron_epp.layers.recompute.wrap import wrap_layer
from megatron_epp.mcore.data.chunk_params import state_of
from megatron_epp.mcore.kinds.base import LayerPlace
from megatron_epp.mcore.kinds.modules import KIND_MODULES, kinds_of_layer
from megatron_epp.mcore.kinds.mtp.mtp_layers import install_mtp, layers_of, mtp_layers_of
from megatron_epp.mcore.kinds.positions import PositionedRotary
from megatron_epp.mcore.model.attention import Attention
from megatron_epp.mcore.model.quantisation import quantise_everywhere

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.hybrid.hybrid_model import HybridModel


def install_in_model(
    model: GPTModel | HybridModel, context: int, attention: Attention, in_loop: bool = False
) -> None:
    """Patch ``model`` to compute chunks.

    The function patches layers, rotary embedding, MTP, and Transformer Engine's linears in place.
    It also creates the entries in Megatron's log that each layer kind needs on every stage.

    Args:
        model: A stage module, not wrapped.
        context: Largest number of tokens of a document.
        attention: The attention of this rank.
        in_loop: Whether an external training loop also calls the model with inputs that are not
            chunks.

    Raises:
        ValueError: A layer is of an unsupported kind.
    """
    add_every_gradient(model)
    quantise_everywhere(model, model.config)
    if not hasattr(model, "_postprocess") or mtp_layers_of(model):  # a HybridModel, or MTP
        # Imported here: Megatron before 0.18 has no HybridModel.
        from megatron_epp.mcore.model.hybrid_stack import take_output_processor

        take_output_processor(model)
    install_mtp(model)
    # PositionedRotary rotates by the positions of the chunk's parameters.
    rotates_axes = model.position_embedding_type == "mrope"
    if getattr(model, "rotary_pos_emb", None) is not None and not rotates_axes:
        fused = model.config.apply_rope_fusion
        model.rotary_pos_emb = PositionedRotary(model.rotary_pos_emb, context, fused)
    for kind in KIND_MODULES:
        kind.prepare(model.config)
    checkpoint = partial(_checkpoint, model.config.distribute_saved_activations)
    installed: list[Any] = []
    for index, layer in enumerate(layers_of(model)):
        if any(layer is other for other in installed):
            continue  # a shared MTP layer, which is already patched
        installed.append(layer)
        dropped = DroppedOutputs()
        for kind in kinds_of_layer(layer):
            kind.install(LayerPlace(layer, index, context, attention, dropped, in_loop))
        layer.forward = wrap_layer(layer.forward, index, state_of, checkpoint, dropped)
        if index == 0:
            layer.forward = _from_here_on(layer.forward)


def _from_here_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a stage's first layer so that its input requires gradients.

    The output of a frozen embedding does not require gradients. With such an input, recomputed
    layers would have no graph. Nor would K and V, to which later slices pass gradients.
    """

    @wraps(forward)
    def wrapped(hidden_states: Tensor, **others: Any) -> Any:
        if torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return forward(hidden_states=hidden_states, **others)

    return wrapped


def add_every_gradient(model: nn.Module) -> None:
    """Make Transformer Engine's linears add to weight gradients instead of overwriting them.

    By default, the backward of the micro-batch whose forward ran first overwrites the gradients. A
    plan may run the backward of other chunks earlier, and their gradients would be lost.
    """
    _set_in_modules(model, "is_first_microbatch", False)
    # Linears must not treat any micro-batch as the first: they would quantise fp8 weights only
    # then.
    _set_in_modules(model, "disable_parameter_transpose_cache", True)


def fuse_weight_gradients(model: nn.Module) -> None:
    """Make Transformer Engine's linears accumulate weight gradients into ``main_grad`` directly.

    The GEMM adds the gradients, so no bf16 gradient is written or stored. Megatron builds the
    linears without this fusion, because its flag for the fusion also applies to the output layer,
    whose fusion needs apex.
    """
    _set_in_modules(model, "fuse_wgrad_accumulation", True)


def _set_in_modules(model: nn.Module, attribute: str, value: bool) -> None:
    for module in model.modules():
        if hasattr(module, attribute):
            setattr(module, attribute, value)


def _checkpoint(distribute: bool, function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    return tensor_parallel.checkpoint(function, bool(distribute), tensor)
