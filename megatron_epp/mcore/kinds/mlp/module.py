"""Dense MLP on chunks."""

from typing import Any, override

from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_mlp, wrap_norm
from megatron_epp.mcore.kinds.base import KindModule, LayerPlace
from megatron_epp.mcore.kinds.local_layers import feed_forward
from megatron_epp.mcore.kinds.mlp.kind import MLPKind


class MLPModule(KindModule):
    """MLP layers in Megatron's modules."""

    KIND = MLPKind()

    @override
    def holds(self, module: Any) -> bool:
        return isinstance(module, MLP)

    @override
    def install(self, place: LayerPlace) -> None:
        mlp = place.layer.mlp
        wrap_norm(place.layer.pre_mlp_layernorm, place.dropped)
        wrap_consumer(mlp.linear_fc1, place.dropped)
        wrap_mlp(mlp, place.dropped)

    @override
    def local_layer(self, config: Any) -> Any:
        return ModuleSpec(module=MLPLayer, submodules=feed_forward(config))
