"""Dense MLP."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import Decoder, Part, RecomputedModule, Sizes, Sublayer


@dataclass(frozen=True)
class MLPSizes(Sizes):
    """Sizes of an MLP.

    Attributes:
        mlp: whether the layer has an MLP, dense or MoE.
        ffn_hidden: hidden size of a dense MLP; 0: as in the model.
    """

    mlp: bool = True
    ffn_hidden: int = 0


class MLPPart(Part):
    """MLP of two matrices, or three with a gate."""

    MIXER, DEFAULT, WORD, ALONE = False, True, "dense", "mlp"

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has a dense MLP."""
        return shape.mlp and not shape.experts

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of the dense MLP."""
        return mlp(model, shape.ffn_hidden or model.ffn_hidden)


def matrices(model: Decoder) -> int:
    """Return the number of weight matrices of an MLP."""
    return 3 if model.gated else 2


def mlp(model: Decoder, width: int) -> Sublayer:
    """Return the quantities of an MLP with the hidden size ``width`` and of its norm."""
    hidden, inside = model.hidden, width * matrices(model)
    return Sublayer(
        parameters=hidden * (inside + 1),
        saved=2 * hidden + inside,
        weight_inputs=2 * hidden + inside,
        recomputed={
            "mlp": RecomputedModule(inside, hidden * inside),
            "layernorm": RecomputedModule(hidden, light=True),
        },
        gathers=int(width > 0),
    )
