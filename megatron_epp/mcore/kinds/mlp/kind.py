"""Dense MLP in Megatron's flags."""

from typing import ClassVar

from megatron_epp.cost.kinds.mlp import MLPPart
from megatron_epp.mcore.kinds.base import LayerKind


class MLPKind(LayerKind):
    """MLP or MoE in every layer of a GPTModel, and in the - and E layers of a HybridModel."""

    PRICED, NAME, SYMBOL, SYMBOLS = MLPPart, "MLP", "-", "-E"
    ABSENT: ClassVar = {"mlp": False}
    SLOT = "mlp"
    TIMED: ClassVar = {"mlp": "mlp", "layernorm": "pre_mlp_layernorm"}
    STACK = "mlp_layer"
