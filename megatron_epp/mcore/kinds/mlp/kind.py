"""The dense MLP, in Megatron."""

from typing import ClassVar

from megatron_epp.cost.kinds.mlp import MLPPart
from megatron_epp.mcore.kinds.base import LayerKind


class MLPKind(LayerKind):
    """An MLP, or experts in its place: in all layers but those of attention of a HybridModel."""

    PRICED, NAME, SYMBOL, SYMBOLS = MLPPart, "MLP", "-", "-E"
    ABSENT: ClassVar = {"mlp": False}
    SLOT = "mlp"
    TIMED: ClassVar = {"mlp": "mlp", "layernorm": "pre_mlp_layernorm"}
    STACK = "mlp_layer"
