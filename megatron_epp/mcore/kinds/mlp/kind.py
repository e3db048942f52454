"""The dense MLP, in Megatron."""

from typing import Any, ClassVar

from megatron_epp.cost.kinds.mlp import MLPPart
from megatron_epp.mcore.kinds.base import LayerKind, LayerPlace


class MLPKind(LayerKind):
    """An MLP, or experts in its place: in all layers but those of attention of a HybridModel."""

    PRICED, NAME, LETTER, LETTERS = MLPPart, "MLP", "-", "-E"
    ABSENT: ClassVar = {"mlp": False}
    SLOT = "mlp"
    TIMED: ClassVar = {"mlp": "mlp", "layernorm": "pre_mlp_layernorm"}
    STACK = "mlp_layer"

    def local_layer(self, config: Any) -> Any:
        from megatron.core.ssm.mlp_layer import MLPLayer
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_epp.mcore.kinds.local_layers import feed_forward

        return ModuleSpec(module=MLPLayer, submodules=feed_forward(config))

    def holds(self, module: Any) -> bool:
        from megatron.core.transformer.mlp import MLP

        return isinstance(module, MLP)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.layers.recompute.wrap import wrap_consumer, wrap_mlp, wrap_norm

        mlp = place.layer.mlp
        wrap_norm(place.layer.pre_mlp_layernorm, place.dropped)
        wrap_consumer(mlp.linear_fc1, place.dropped)
        wrap_mlp(mlp, place.dropped)
