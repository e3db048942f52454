"""MoE layers on chunks (router.py)."""

from collections.abc import Sequence
from typing import Any, override

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_epp.mcore.kinds.base import ChosenBy, KindModule, LayerPlace
from megatron_epp.mcore.kinds.local_layers import feed_forward
from megatron_epp.mcore.kinds.moe.choose_halves import choose_halves
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from megatron_epp.mcore.kinds.moe.limits import has_experts
from megatron_epp.mcore.kinds.moe.local import fix_latent_experts
from megatron_epp.mcore.kinds.moe.permutation import compile_permutations
from megatron_epp.mcore.kinds.moe.router import install_in_moe, prepare_log, routing_tensors
from megatron_epp.mcore.kinds.moe.stacked import stack_experts


class MoEModule(KindModule):
    """MoE layers in Megatron's modules."""

    KIND = MoEKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, MoELayer)

    @override
    def prepare(self, config: Any) -> None:
        if has_experts(config):
            prepare_log(config)

    @override
    def install(self, place: LayerPlace) -> None:
        install_in_moe(place.layer, place.index, place.dropped, place.in_loop)

    @override
    def install_in_wrapped(self, models: Sequence[Any], group: ProcessGroup | None) -> None:
        if has_experts(get_model_config(models[0])):
            stack_experts(models, group)

    @override
    def choose_paths(self, models: Sequence[Any], chosen_by: ChosenBy) -> str:
        return choose_halves(models, chosen_by)

    @override
    def compile_sizes(self, module: Any, device: torch.device) -> None:
        compile_permutations(module, device)

    @override
    def changed(self, model: Any) -> list[Tensor]:
        return routing_tensors(model)

    @override
    def local_layer(self, config: Any) -> Any:
        experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1)
        return ModuleSpec(module=MoETransformerLayer, submodules=feed_forward(config, experts))

    @override
    def fix_local(self, layer: Any, config: Any) -> None:
        if getattr(config, "moe_latent_size", None):
            layer.mlp = fix_latent_experts(layer.mlp)
