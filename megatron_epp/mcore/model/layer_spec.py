"""Model configuration of Megatron's trainer, and features that Megatron's local layers lack."""

import copy
from functools import partial
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training import argument_utils
from megatron.training.models.gpt import default_layer_spec
from megatron.training.models.hybrid import HybridModelConfig

from megatron_epp.mcore.kinds.modules import KIND_MODULES
from megatron_epp.mcore.model.hybrid_stack import local_stack_spec


def described(args: Any) -> Any:
    """Return the model configuration from which Megatron's trainer builds the model.

    The model is a HybridModel if ``args`` have a layer pattern, else a GPTModel.
    """
    if args.hybrid_layer_pattern is None:
        return argument_utils.gpt_config_from_args(args)
    return argument_utils.hybrid_config_from_args(args)


def fix_layer_spec(description: Any) -> None:
    """Add features that Megatron's local layers lack to the layer spec in ``description``.

    ``description`` is a result of :func:`described`, and is changed in place. Without
    --transformer-impl local, the function does nothing.
    """
    config = description.transformer
    if config.transformer_impl != "local":
        return
    if isinstance(description, HybridModelConfig):
        if description.hybrid_stack_spec is None:
            description.hybrid_stack_spec = local_stack_spec(
                config, description.hybrid_layer_pattern
            )
        return
    wanted = description.transformer_layer_spec
    description.epp_fix_mtp = partial(_fix_mtp, config)

    def spec(description: Any, vp_stage: int | None = None) -> Any:
        if wanted is None:
            own = description.transformer  # of one stage module, if a rank has several
            blocks = (kind.local_block(own, vp_stage) for kind in KIND_MODULES)
            layers_spec = next((block for block in blocks if block is not None), None)
            layers_spec = (
                default_layer_spec(description, vp_stage) if layers_spec is None else layers_spec
            )
        else:
            layers_spec = copy.deepcopy(
                wanted if isinstance(wanted, ModuleSpec) else wanted(description)
            )
        # Layers of one kind share a spec, so the list may contain a spec several times.
        for layer in getattr(layers_spec, "layer_specs", None) or [layers_spec]:
            for kind in KIND_MODULES:
                kind.fix_local(layer.submodules, description.transformer)
        return layers_spec

    description.transformer_layer_spec = spec


def _fix_mtp(config: Any, block: Any) -> Any:
    """Add features to the local layers of the MTP layers in ``block``, and return ``block``."""
    for depth in [] if block is None else block.layer_specs:
        for kind in KIND_MODULES:
            kind.fix_local(depth.submodules.mtp_model_layer.submodules, config)
    return block
